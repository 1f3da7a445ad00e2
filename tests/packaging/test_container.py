"""docker/Dockerfile.cpu without Docker: its instructions replayed in chroots of Debian's packages.

Asked for with KTRANSFORMERS_TEST_CONTAINER=1; needs root, debootstrap and some gigabytes under --basetemp or /tmp.
pip's settings of this machine (an index, links to wheels, a certificate) hold in the chroots too. The build of torch
can be named as `docker build --build-arg` would: KTRANSFORMERS_TEST_CONTAINER_TORCH and ..._TORCH_INDEX.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FILES = ("Dockerfile.cpu", "Dockerfile.cuda")
CERTIFICATES = "/run/certificates.crt"


def instructions(name: str) -> list[tuple[str, str]]:
    """(keyword, rest) of each instruction, continued lines joined."""
    text = re.sub(r"^#.*\n", "", (ROOT / "docker" / name).read_text(encoding="utf-8"), flags=re.MULTILINE)
    lines = [line for line in text.replace("\\\n", "").splitlines() if line.strip()]
    return [(line.split(maxsplit=1)[0], line.split(maxsplit=1)[1].strip()) for line in lines]


@pytest.mark.parametrize("name", FILES)
def test_containers_serve_as_a_user_and_tell_their_health(name: str) -> None:
    last = dict(instructions(name))
    assert last["USER"] == "ktransformers"
    assert last["EXPOSE"] == "10002"
    assert "http://127.0.0.1:10002/health" in last["HEALTHCHECK"]
    assert json.loads(last["ENTRYPOINT"]) == ["ktransformers", "serve", "--host", "0.0.0.0"]
    requirement = re.search(r'"(torch[^"]+)"', (ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    assert requirement
    assert f'TORCH="{requirement[1]}"' in [rest for keyword, rest in instructions(name) if keyword == "ARG"]


@pytest.mark.every(4)
@pytest.mark.parametrize("name", FILES)
def test_the_published_port_shows_the_page(name: str) -> None:
    """The command and the variables of the image, in front of a browser that came by a port of this machine."""
    steps = instructions(name)
    entry = json.loads(dict(steps)["ENTRYPOINT"])
    variables = dict(word.split("=", 1) for keyword, rest in steps if keyword == "ENV" for word in shlex.split(rest))
    environment = os.environ | {name: text for name, text in variables.items() if name.startswith("KTRANSFORMERS_")}
    command = [sys.executable, "-m", *entry, "--backend_type", "ktransformers", "--port", "0", "--cpu_infer", "1"]
    with subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        port = next(
            filter(None, (re.search(r"serving .* on https?://\S+?:(\d+)/v1", line) for line in process.stderr))
        )[1]
        try:
            for host in (f"127.0.0.1:{port}", "localhost:8080"):  # -p 8080:10002
                headers = {"Host": host, "Accept": "text/html", "Origin": f"http://{host}"}
                request = urllib.request.Request(f"http://127.0.0.1:{port}/", headers=headers)
                with urllib.request.urlopen(request, timeout=60) as response:
                    assert "page/app.js" in response.read().decode()
        finally:
            process.kill()
            process.stderr.read()


@dataclass
class Stage:
    """One FROM: a root, and what the instructions have set so far."""

    root: Path
    environment: dict[str, str] = field(default_factory=dict)
    mounts: list[str] = field(default_factory=list)
    folder: str = "/"
    user: str = "root"

    def run(self, command: list[str], *, check: bool = True, alone: bool = False) -> subprocess.CompletedProcess[str]:
        """Run in the chroot; `alone`: in a network of its own, where no other server has the port.

        Mounts are the command's own too: they end with it, so that nobody who deletes the root deletes what they show.
        """
        (self.root / self.folder.lstrip("/")).mkdir(parents=True, exist_ok=True)
        environment = {"PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", **self.environment}
        environment |= {"HOME": "/root" if self.user == "root" else f"/home/{self.user}"}
        inside = ["chroot", f"--userspec={self.user}", str(self.root), "/usr/bin/env", "-i"]
        inside += [f"{name}={value}" for name, value in environment.items()]
        inside += ["/bin/sh", "-c", f"cd {shlex.quote(self.folder)} && exec {shlex.join(command)}"]
        steps = [f"mount {mount}" for mount in self.mounts] + (["ip link set lo up"] if alone else [])
        outside = ["unshare", "--mount", *(["--net"] if alone else []), "sh", "-ec"]
        outside.append("; ".join([*steps, f"exec {shlex.join(inside)}"]))
        done = subprocess.run(outside, capture_output=True, text=True, check=False)
        assert not check or done.returncode == 0, f"{command}:\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
        return done


class Replay:
    """Carries out a file's instructions. Roots are copies of one that debootstrap made."""

    def __init__(self, folder: Path, arguments: dict[str, str]):
        self.folder = folder
        self.arguments = arguments
        self.stages: dict[str, Stage] = {}
        self.stage = Stage(folder)
        made = ["debootstrap", "--variant=minbase", "bookworm", folder / "base"]
        subprocess.run(made, stdout=subprocess.DEVNULL, check=True)

    def begin(self, rest: str) -> None:
        image, _, name = rest.partition(" AS ")
        assert image == "debian:bookworm-slim"
        root = self.folder / f"stage{len(self.stages)}"
        subprocess.run(["cp", "-a", self.folder / "base", root], check=True)
        for file in ("resolv.conf", "hosts"):
            shutil.copy(Path("/etc") / file, root / "etc" / file)
        self.stage = self.stages[name or "last"] = Stage(root)
        self.stage.mounts = [f"-t proc proc {root}/proc", f"-t tmpfs -o mode=1777 tmpfs {root}/dev/shm"]
        settings, folders = pip_settings()
        if "PIP_CERT" in settings:
            shutil.copy(settings["PIP_CERT"], f"{root}{CERTIFICATES}")
            settings["PIP_CERT"] = CERTIFICATES
        self.stage.environment |= settings
        for folder in folders:
            Path(f"{root}{folder}").mkdir(parents=True)
            self.stage.mounts.append(f"--bind -o ro {folder} {root}{folder}")

    def copy(self, rest: str) -> None:
        *options, source, target = rest.split()
        into = self.stage.root / os.path.join(self.stage.folder, target).lstrip("/")
        into.mkdir(parents=True, exist_ok=True)
        if options:
            stage = self.stages[options[0].removeprefix("--from=")]
            subprocess.run(["cp", "-a", f"{stage.root}{source}/.", into], check=True)
            return
        lines = (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines()
        ignored = [f":(exclude){line}" for line in lines if "*" not in line]  # those with * git ignores by itself
        listed = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard", "--", *ignored]
        files = subprocess.run(listed, cwd=ROOT, capture_output=True, check=True).stdout
        subprocess.run(["cp", "--parents", "-t", into, *files.decode().strip("\0").split("\0")], cwd=ROOT, check=True)

    def replay(self, keyword: str, rest: str) -> None:
        match keyword:
            case "FROM":
                self.begin(rest)
            case "RUN":
                self.stage.run(["/bin/sh", "-c", rest])
            case "COPY":
                self.copy(rest)
            case "ARG":
                name, value = shlex.split(rest)[0].split("=", 1)
                self.stage.environment[name] = self.arguments.get(name, value)
            case "ENV":
                self.stage.environment |= dict(pair.split("=", 1) for pair in shlex.split(rest))
            case "WORKDIR":
                self.stage.folder = rest
            case "USER":
                self.stage.user = rest
            case _:
                assert keyword in ("EXPOSE", "HEALTHCHECK", "ENTRYPOINT"), keyword


def pip_settings() -> tuple[dict[str, str], list[Path]]:
    """This machine's pip settings as environment variables, and the folders that they name."""
    listed = subprocess.run([sys.executable, "-m", "pip", "config", "list"], capture_output=True, text=True, check=True)
    settings = {}
    for line in listed.stdout.splitlines():
        name, _, value = line.partition("=")
        settings["PIP_" + name.rpartition(".")[2].upper().replace("-", "_")] = " ".join(shlex.split(value)).strip()
    words = " ".join(value for name, value in settings.items() if name != "PIP_CERT").split()
    paths = [Path(word) for word in words if word.startswith("/")]
    # The pages of an index name files beside them.
    paths += [Path(word.removeprefix("file://")).parent for word in words if word.startswith("file:///")]
    return settings, [path for path in dict.fromkeys(paths) if path.is_dir()]


@pytest.fixture
def replay(tmp_path: Path) -> Iterator[Replay]:
    if os.environ.get("KTRANSFORMERS_TEST_CONTAINER") != "1":
        pytest.skip("set KTRANSFORMERS_TEST_CONTAINER=1 to build the container in a chroot (minutes, gigabytes)")
    if os.geteuid() != 0 or shutil.which("debootstrap") is None:
        pytest.skip("a chroot needs root and debootstrap (apt-get install debootstrap)")
    names = ("TORCH", "TORCH_INDEX")
    given = {name: os.environ.get(f"KTRANSFORMERS_TEST_CONTAINER_{name}") for name in names}
    made = Replay(tmp_path, {name: value for name, value in given.items() if value})
    yield made
    shutil.rmtree(tmp_path)


SERVE = """
import json, subprocess, sys, time, urllib.request
server = subprocess.Popen(json.loads(sys.argv[1]))
health = json.loads(sys.argv[2])
while subprocess.run(health, capture_output=True).returncode != 0:
    assert server.poll() is None, "the server ended"
    time.sleep(0.5)
for _ in range(240):
    try:
        urllib.request.urlopen("http://127.0.0.1:10002/ready")
        break
    except urllib.error.HTTPError as error:
        assert error.code == 503, error.read()
        time.sleep(0.5)
else:
    raise SystemExit("the model was not loaded in two minutes")
model = json.load(urllib.request.urlopen("http://127.0.0.1:10002/v1/models"))["data"][0]["id"]
body = {"model": model, "temperature": 0, "messages": [{"role": "user", "content": "What is 17 + 25?"}]}
headers = {"Content-Type": "application/json"}
request = urllib.request.Request("http://127.0.0.1:10002/v1/chat/completions", json.dumps(body).encode(), headers)
print("ANSWER", json.load(urllib.request.urlopen(request))["choices"][0]["message"]["content"])
server.terminate()
sys.exit(server.wait())
"""


@pytest.mark.slow
def test_the_cpu_container_builds_and_answers(replay: Replay) -> None:
    said = instructions("Dockerfile.cpu")
    for keyword, rest in said:
        replay.replay(keyword, rest)
    last, stage = dict(said), replay.stage
    assert stage.run(["id", "-un"]).stdout.strip() == "ktransformers"
    assert stage.run(["touch", "/opt/ktransformers/bin/x"], check=False).returncode != 0
    assert not list(stage.root.glob("opt/ktransformers/lib/*/site-packages/nvidia*"))
    health = json.loads(last["HEALTHCHECK"].partition(" CMD ")[2])
    done = stage.run(["python3", "-c", SERVE, last["ENTRYPOINT"], json.dumps(health)], alone=True)
    assert "ANSWER 17 + 25 = 42." in done.stdout
