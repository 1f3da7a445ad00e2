"""Has `ktransformers._native` loaded from KTRANSFORMERS_NATIVE, in this process and its children; see run.sh."""

import importlib.machinery
import importlib.util
import os
import sys


class _Finder:
    @staticmethod
    def find_spec(name: str, path: object = None, target: object = None) -> importlib.machinery.ModuleSpec | None:
        if name != "ktransformers._native":
            return None
        return importlib.util.spec_from_file_location(name, os.environ["KTRANSFORMERS_NATIVE"])


sys.meta_path.insert(0, _Finder)  # before the finders of editable installs
