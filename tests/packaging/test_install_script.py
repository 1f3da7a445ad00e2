"""tools/install.sh on machines that lack something: one line with the command that mends it, before any download.

The machines are folders: PATH holds the few programs that the script uses and what a case adds; nothing else is found.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "tools" / "install.sh"
NEEDED = (
    "sh",
    "sed",
    "uname",
    "dirname",
    "df",
    "awk",
    "tr",
    "grep",
    "head",
    "find",
    "touch",
    "mkdir",
    "cat",
    "rm",
    "sleep",
)


class Machine:
    """A PATH of its own."""

    def __init__(self, folder: Path):
        self.bin = folder / "bin"
        self.bin.mkdir()
        for name in NEEDED:
            found = shutil.which(name)
            assert found
            (self.bin / name).symlink_to(found)

    def has(self, name: str, script: str = "exit 0") -> Machine:
        (self.bin / name).write_text(f"#!/bin/sh\n{script}\n")
        (self.bin / name).chmod(0o755)
        return self

    def has_python(self, name: str = "python3", *, lacks: str = "nothing at all") -> Machine:
        """The interpreter of this test, but for a statement that has `lacks` in it."""
        return self.has(name, f'case "$*" in *"{lacks}"*) exit 1;; esac\nexec "{sys.executable}" "$@"')

    def check(self, **environment: str) -> tuple[int, str]:
        command = ["/bin/sh", str(SCRIPT), "--check"]
        environment = {"PATH": str(self.bin), **environment}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        assert done.stdout == ""
        return done.returncode, done.stderr


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


OLD = 'case "$*" in *sys.exit*) exit 1;; *) echo 3.8;; esac'


def test_a_machine_that_has_all(machine: Machine) -> None:
    code, said = machine.has_python().has("c++").check(TORCH="cpu")
    assert (code, said) == (
        0,
        "python3 can install ktransformers; torch for cpu, as TORCH=cpu says: 0.3 GB to download, 1.2 GB on disk\n",
    )


@pytest.mark.parametrize(
    ("manager", "mend"),
    [
        ("apt-get", "sudo apt-get install -y g++"),
        ("dnf", "sudo dnf install -y gcc-c++"),
        ("zypper", "sudo zypper install -y gcc-c++"),
        ("pacman", "sudo pacman -S --needed gcc"),
        ("brew", "your system's package manager for: g++"),
    ],
)
def test_no_compiler(machine: Machine, manager: str, mend: str) -> None:
    code, said = machine.has_python().has(manager).check()
    assert (code, said) == (1, f"error: a C++ compiler missing; run: {mend}\n")


def test_a_compiler_that_cxx_names_is_enough(machine: Machine) -> None:
    assert machine.has_python().has("my-gcc").check(CXX="my-gcc")[0] == 0


def test_no_venv_module_and_no_headers(machine: Machine) -> None:
    version = f"{sys.version_info[0]}.{sys.version_info[1]}"
    machine.has("apt-get").has("c++").has_python(lacks="ensurepip")
    expected = f"error: Python's venv module missing; run: sudo apt-get install -y python{version}-venv\n"
    assert machine.check() == (1, expected)
    machine.has_python(lacks="Python.h")
    expected = f"error: Python's header files missing; run: sudo apt-get install -y python{version}-dev\n"
    assert machine.check() == (1, expected)


def test_all_that_is_missing_is_one_command(machine: Machine) -> None:
    code, said = machine.has("dnf").has_python(lacks="Python.h").check()
    version = f"{sys.version_info[0]}.{sys.version_info[1]}"
    expected = f"missing; run: sudo dnf install -y gcc-c++ python{version}-devel\n"
    assert (code, said) == (1, f"error: a C++ compiler and Python's header files {expected}")


def test_an_old_default_python_gives_way_to_a_suitable_one(machine: Machine) -> None:
    machine.has("c++").has("python3", OLD).has_python("python3.12")
    code, said = machine.check(TORCH="cuda")
    assert code == 0
    assert said.startswith("python3.12 can install ktransformers; torch for cuda, as TORCH=cuda says: 3 GB")


@pytest.mark.parametrize(
    ("programs", "mend"),
    [
        (
            {"apt-get": "exit 0", "apt-cache": '[ "$2" = python3.12 ]'},
            "sudo apt-get install -y python3.12 python3.12-venv python3.12-dev",
        ),
        ({"dnf": "exit 0"}, "sudo dnf install -y python3.12 python3.12-devel"),
        ({}, "curl -LsSf https://astral.sh/uv/install.sh | sh; ~/.local/bin/uv python install 3.13"),
    ],
)
def test_no_suitable_python(machine: Machine, programs: dict[str, str], mend: str) -> None:
    for name, script in programs.items():
        machine.has(name, script)
    expected = f"error: Python 3.11 to 3.14 is needed and there is none here; run: {mend}\n"
    assert machine.has("python3", OLD).check() == (1, expected)


def test_a_python_that_was_asked_for_is_not_replaced(machine: Machine) -> None:
    code, said = machine.has_python().has("old", OLD).check(PYTHON="old")
    assert code == 1
    assert said == ("error: Python 3.11 to 3.14 is needed, PYTHON=old is 3.8; leave PYTHON away or name another one\n")


def test_torch_follows_the_machine(machine: Machine) -> None:
    machine.has_python().has("c++")
    if not Path("/dev/nvidiactl").exists():
        assert "torch for cpu, no NVIDIA GPU was found; TORCH=cuda takes" in machine.check()[1]
    assert "torch for cuda, an NVIDIA GPU was found; TORCH=cpu takes" in machine.has("nvidia-smi").check()[1]
    assert machine.check(TORCH="rocm") == (1, "error: TORCH=rocm is not known; it is cpu or cuda\n")


PIP = r"""
case "$*" in
    *setsid*) shift 2; exec PYTHON -c "import os, signal, sys
os.setsid()
signal.signal(signal.SIGINT, signal.SIG_DFL)
os.execvp(sys.argv[1], sys.argv[1:])" "$@" ;;
    *'version("ktransformers")'*) exit NAMESAKE ;;
    *" --no-deps"*" -e "*) shift 3; echo "pip $*" >>ASKED.compile; COMPILE ;;
    *" uninstall "*) shift 3; echo "pip $*" >>ASKED ;;
    *"index versions"*) echo "Available versions: 2.15.0, OFFERED2.12.0" ;;
    *" --no-index "*) exit THERE ;;
    *" install "*) shift 3; echo "pip $*" >>ASKED; DOWNLOAD ;;
    *"-m venv"*) ;;
    *) exec PYTHON "$@" ;;
esac
"""


class Install:
    """tools/install.sh on a machine whose pip is a stand-in, which notes what it is asked for.

    offered: builds of torch besides the index's. compile, download: what pip's processes do, in sh.
    """

    def __init__(
        self,
        machine: Machine,
        venv: Path,
        offered: str = "",
        namesake: int = 1,
        has_torch: bool = False,
        compile: str = "exit 0",
        download: str = "exit 0",
    ):
        (venv / "bin").mkdir(parents=True)
        self.machine, self.venv, self.notes = machine, venv, venv / "asked"
        text = PIP.replace("OFFERED", offered).replace("PYTHON", sys.executable).replace("NAMESAKE", str(namesake))
        text = text.replace("THERE", str(int(not has_torch))).replace("ASKED", str(self.notes))
        text = text.replace("COMPILE", compile).replace("DOWNLOAD", download)
        (venv / "bin" / "python").write_text("#!/bin/sh" + text)
        (venv / "bin" / "python").chmod(0o755)
        machine.has("c++")

    def start(self, *words: str, **environment: str) -> subprocess.Popen[str]:
        command = ["/bin/sh", str(SCRIPT), str(self.venv), *words]
        environment = {"PATH": str(self.machine.bin), **environment}
        return subprocess.Popen(
            command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
        )

    def asked(self, *words: str, **environment: str) -> list[str]:
        """What an install asks pip for: first the project that is compiled, then the packages that are downloaded."""
        process = self.start(*words, **environment)
        out, said = process.communicate()
        assert (process.returncode, out) == (0, ""), said
        compiled = (self.venv / "asked.compile").read_text().splitlines()
        return compiled + self.notes.read_text().splitlines()


ALL_TIERS = " ".join(f"--config-settings cmake.define.KTRANSFORMERS_{one}" for one in ("TIERS=all", "EMULATED=ON"))
COMPILED = f"pip install -q --no-deps {ALL_TIERS} -e ."


def asked_of_pip(machine: Machine, venv: Path, **options: Any) -> list[str]:
    """What an install of the tests' tools into `venv` asks pip for, but for the project."""
    given = {name: options.pop(name) for name in ("offered", "namesake", "has_torch") if name in options}
    compiled, *asked = Install(machine, venv, **given).asked("dev", **options)
    assert compiled == COMPILED
    return asked


@pytest.mark.parametrize(
    ("torch", "offered", "expected"),
    [
        ("cpu", "2.13.0+cpu, ", "pip install -q torch==2.13.0+cpu torch>=2.11"),
        ("cpu", "", "pip install -q --retries 1 --index-url https://torch.example/cpu torch>=2.11"),
        ("cuda", "2.13.0+cpu, ", "pip install -q torch>=2.11"),
    ],
)
def test_where_torch_comes_from(machine: Machine, tmp_path: Path, torch: str, offered: str, expected: str) -> None:
    """Two steps: torch, of the build that was chosen; then everything else, for which that torch is good."""
    asked = asked_of_pip(
        machine, tmp_path / "venv", offered=offered, TORCH=torch, TORCH_INDEX="https://torch.example/cpu"
    )
    assert asked == [expected, f"pip install -q -r {tmp_path}/venv/requirements.txt"]


@pytest.mark.parametrize("torch", ["cpu", "cuda"])
def test_torch_that_is_there_and_good_stays(machine: Machine, tmp_path: Path, torch: str) -> None:
    asked = asked_of_pip(machine, tmp_path / "venv", has_torch=True, TORCH=torch)
    assert asked == [f"pip install -q -r {tmp_path}/venv/requirements.txt"]


def test_constraints_hold_for_all_and_a_namesake_goes_first(machine: Machine, tmp_path: Path) -> None:
    asked = asked_of_pip(
        machine, tmp_path / "venv", namesake=0, TORCH="cpu", TORCH_INDEX="https://t.example", CONSTRAINTS="pins.txt"
    )
    assert asked == [
        "pip uninstall -q -y ktransformers",
        "pip install -c pins.txt -q --retries 1 --index-url https://t.example torch>=2.11",
        f"pip install -c pins.txt -q -r {tmp_path}/venv/requirements.txt",
    ]


def test_cuda_brings_its_own_pair_of_torch_and_triton(machine: Machine, tmp_path: Path) -> None:
    """torch for CUDA asks for one triton, which is not the one that tests without a GPU are pinned to."""
    pins = tmp_path / "pins.txt"
    pins.write_text("# why\ntorch==2.13.0\ntriton==3.9.0\ntransformers==5.24.0\n")
    asked = asked_of_pip(machine, tmp_path / "venv", TORCH="cuda", CONSTRAINTS=str(pins))
    left = tmp_path / "venv" / "constraints.txt"
    assert left.read_text() == "# why\ntransformers==5.24.0\n"
    assert asked == [
        f"pip install -c {left} -q torch>=2.11",
        f"pip install -c {left} -q -r {tmp_path}/venv/requirements.txt",
    ]


def test_a_chat_compiles_the_tiers_of_this_machine_and_tests_all(machine: Machine, tmp_path: Path) -> None:
    first = Install(machine, tmp_path / "chat").asked(TORCH="cpu", TORCH_INDEX="https://torch.example/cpu")
    assert first == [
        "pip install -q --no-deps -e .",
        "pip install --no-compile -q --retries 1 --index-url https://torch.example/cpu torch>=2.11",
        f"pip install --no-compile -q -r {tmp_path}/chat/requirements.txt",
    ]
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    wanted = (tmp_path / "chat" / "requirements.txt").read_text().splitlines()
    assert wanted == project["dependencies"]
    kept = Install(machine, tmp_path / "kept").asked(TORCH="cuda", PYTHONDONTWRITEBYTECODE="1")
    assert kept[1] == "pip install -q torch>=2.11"
    assert Install(machine, tmp_path / "tests").asked("dev", TORCH="cuda")[0] == COMPILED
    wanted = (tmp_path / "tests" / "requirements.txt").read_text().splitlines()
    assert wanted == project["dependencies"] + project["optional-dependencies"]["dev"]


def test_kernels_are_compiled_while_packages_are_downloaded(machine: Machine, tmp_path: Path) -> None:
    """Each side waits for the other to have begun."""
    met = [tmp_path / "compiling", tmp_path / "downloading"]
    for fifo in met:
        os.mkfifo(fifo)
    compile, download = f"read x <{met[0]}; echo >{met[1]}", f"echo >{met[0]}; read x <{met[1]}; exit 0"
    install = Install(machine, tmp_path / "venv", compile=compile, download=download, has_torch=True)
    assert len(install.asked(TORCH="cpu")) == 2


def test_kernels_that_do_not_compile_fail_the_install(machine: Machine, tmp_path: Path) -> None:
    install = Install(machine, tmp_path / "venv", compile="echo kernel.cpp:1: no such thing >&2; exit 1")
    process = install.start(TORCH="cuda")
    said = process.communicate()[1].splitlines()
    log = tmp_path / "venv" / "compile.log"
    assert process.returncode == 1
    assert said[-2:] == [
        "kernel.cpp:1: no such thing",
        f"error: the C++ kernels could not be compiled (above, and in {log})",
    ]
    assert "no such thing" in log.read_text()


@pytest.mark.parametrize("how", ["a download fails", "Ctrl-C", "terminated"])
def test_no_compiler_outlives_the_install(machine: Machine, tmp_path: Path, how: str) -> None:
    """The compiler holds the write end of a fifo: reading it ends when the compiler has."""
    began, alive = tmp_path / "began", tmp_path / "alive"
    os.mkfifo(began)
    os.mkfifo(alive)
    sleeper = f"{sys.executable} -c 'import signal; signal.pause()'"
    compile = f"exec 9>{alive}; echo >{began}; {sleeper}; exit 0"
    # The compiler has begun before the download goes on; then that fails, or is interrupted as a terminal does it.
    # It says itself that it runs: a shell's child that is only being started would miss the one signal.
    waiter = f"exec {sys.executable} -c 'import os, signal; os.write(9, bytes([10])); signal.pause()' 9>{alive}"
    download = f"read x <{began}; " + ("exit 1" if how == "a download fails" else waiter)
    install = Install(machine, tmp_path / "venv", compile=compile, download=download)
    process = install.start(TORCH="cuda")
    with alive.open() as reader:
        if how != "a download fails":
            reader.readline()
            os.killpg(process.pid, signal.SIGINT if how == "Ctrl-C" else signal.SIGTERM)
        reader.read()
    process.communicate()
    assert process.returncode == {"a download fails": 1, "Ctrl-C": 130, "terminated": 143}[how]


def test_a_compiler_that_misses_the_first_signal_is_stopped_too(machine: Machine, tmp_path: Path) -> None:
    """Between fork and exec a shell's child takes a signal for the shell's own, and goes on. This one ignores it."""
    began, alive = tmp_path / "began", tmp_path / "alive"
    os.mkfifo(began)
    os.mkfifo(alive)
    code = "import signal; signal.signal(signal.SIGINT, signal.SIG_IGN); open(9, 'w').write(chr(10)); signal.pause()"
    compile = f'exec 9>{alive} 8>{began}; {sys.executable} -c "{code}" 9>&8; exit 0'
    install = Install(machine, tmp_path / "venv", compile=compile, download=f"read x <{began}; exit 1")
    process = install.start(TORCH="cuda")
    with alive.open() as reader:
        reader.read()
    process.communicate()
    assert process.returncode == 1


MAKEFILES = ("Makefile", "pyproject.toml", "CMakeLists.txt", "cmake/tiers.cmake", ".ci/constraints.txt")
STAND_IN = """
echo "install $* CONSTRAINTS=$CONSTRAINTS"
mkdir -p "$1/bin"
for name in ktransformers python ruff clang-format mypy lint-imports; do
    printf '#!/bin/sh\necho ran %s CONSTRAINTS=$CONSTRAINTS\n' "$name" >"$1/bin/$name"
    chmod +x "$1/bin/$name"
done
"""


@pytest.fixture
def clone(machine: Machine, tmp_path: Path) -> Callable[..., list[str]]:
    """A clone in which a stand-in is tools/install.sh; what its `make` says of installs, with nothing set but PATH."""
    folder = tmp_path / "clone"
    for name in MAKEFILES:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, folder / name)
    (folder / "tools").mkdir()
    (folder / "tools" / "install.sh").write_text("#!/bin/sh" + STAND_IN)
    (folder / "tools" / "install.sh").chmod(0o755)
    for name in ("make", "chmod"):
        found = shutil.which(name)
        assert found
        (machine.bin / name).symlink_to(found)

    def make(*words: str, **environment: str) -> list[str]:
        environment = {"PATH": str(machine.bin), **environment}
        done = subprocess.run(["make", *words], cwd=folder, env=environment, capture_output=True, text=True, check=True)
        return [line for line in done.stdout.splitlines() if line.startswith("install ")]

    return make


PINNED = ["install .venv dev CONSTRAINTS=.ci/constraints.txt"]


@pytest.mark.parametrize("target", ["test", "test-all", "lint", "format"])
def test_make_pins_what_tests_get_where_a_chat_ran_before(clone: Callable[..., list[str]], target: str) -> None:
    """README's commands in README's order, no variable set."""
    assert clone("chat") == ["install .venv CONSTRAINTS="]
    assert clone(target) == PINNED
    assert clone(target) == []
    assert clone("chat") == []


@pytest.mark.parametrize(
    ("words", "environment", "constraints"),
    [
        ((), {}, ".ci/constraints.txt"),
        (("CONSTRAINTS=",), {}, ""),
        ((), {"CONSTRAINTS": ""}, ""),
        (("CONSTRAINTS=CMakeLists.txt",), {}, "CMakeLists.txt"),
        ((), {"CONSTRAINTS": "CMakeLists.txt"}, "CMakeLists.txt"),
    ],
)
def test_whoever_sets_constraints_gets_them(
    clone: Callable[..., list[str]], words: tuple[str, ...], environment: dict[str, str], constraints: str
) -> None:
    assert clone("test", *words, **environment) == [f"install .venv dev CONSTRAINTS={constraints}"]
