"""Pictures by URL, from a server of this machine whose names are made up: no look-up leaves it."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from ktransformers.errors import ConfigError
from ktransformers.media import fetching
from ktransformers.media.fetched import FetchedPictures
from ktransformers.media.fetching import fetch, fetch_if_changed, is_allowed
from ktransformers.media.picture import ReadPicture
from ktransformers.media.reader import key_of

PICTURE = b"\x89PNG any bytes"
NAMES = {
    "pictures.example": "127.0.0.1",
    "cdn.example.org": "93.184.216.34",
    "inside.example.org": "10.0.0.7",
    "metadata.example.org": "169.254.169.254",
    "six.example.org": "::1",
    "mapped.example.org": "::ffff:127.0.0.1",
    "nat.example.org": "64:ff9b::7f00:1",
    "carrier.example.org": "100.64.0.1",
    "zero.example.org": "0.0.0.0",
    "many.example.org": "224.0.0.1",
}


class Handler(BaseHTTPRequestHandler):
    asked: list[tuple[str, str | None]]
    questions: list[str | None]
    tag = '"1"'
    release: threading.Event

    def do_GET(self) -> None:
        type(self).asked.append((self.path, self.headers["Host"]))
        name, _, argument = self.path[1:].partition("?")[0].partition("/")
        getattr(self, f"say_{name}")(argument)

    def say_picture(self, argument: str) -> None:
        self.send_response(200)
        self.send_header("Content-Length", str(len(PICTURE)))
        self.end_headers()
        self.wfile.write(PICTURE)

    def say_versioned(self, argument: str) -> None:
        """argument: what Cache-Control says."""
        asked = self.headers["If-None-Match"]
        type(self).questions.append(asked)
        self.send_response(304 if asked == self.tag else 200)
        self.send_header("ETag", self.tag)
        self.send_header("Cache-Control", argument)
        self.end_headers()
        if asked != self.tag:
            self.wfile.write(PICTURE + self.tag.encode())

    def say_to(self, argument: str) -> None:
        self.send_response(302)
        self.send_header("Location", argument)
        self.end_headers()

    def say_again(self, argument: str) -> None:
        self.say_to(f"/again/{int(argument) - 1}" if int(argument) > 1 else "/picture")

    def say_status(self, argument: str) -> None:
        self.send_response(int(argument))
        self.end_headers()

    def say_long(self, argument: str) -> None:
        self.send_response(200)
        self.send_header("Content-Length", str(1 << 40))
        self.end_headers()

    def say_endless(self, argument: str) -> None:
        self.send_response(200)
        self.end_headers()
        while True:
            self.wfile.write(bytes(1 << 16))

    def say_short(self, argument: str) -> None:
        self.send_response(200)
        self.send_header("Content-Length", "100")
        self.end_headers()
        self.wfile.write(b"abc")

    def say_never(self, argument: str) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b"a")
        self.wfile.flush()
        self.release.wait(60)

    def log_message(self, *args: object) -> None:
        """Nothing."""


@pytest.fixture
def site(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A base URL of a server that every name leads to, once its address has been checked; and what it was asked."""
    handler = type("Own", (Handler,), {"asked": [], "questions": [], "release": threading.Event()})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.daemon_threads = True
    server.handle_error = lambda request, address: None  # type: ignore[method-assign]
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    port = server.server_address[1]

    really = socket.getaddrinfo

    def look_up(host: str, asked_port: int, *args: Any, **kwargs: Any) -> list[Any]:
        if host == "127.0.0.1":
            return really(host, asked_port, *args, **kwargs)
        if host not in NAMES:
            raise socket.gaierror(-2, "Name or service not known")
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (NAMES[host], asked_port))]

    connected: list[str] = []
    real = socket.create_connection

    def connect(address: tuple[str, int], **kwargs: Any) -> socket.socket:
        connected.append(address[0])
        return real(("127.0.0.1", port), **kwargs)

    monkeypatch.setattr(fetching.socket, "getaddrinfo", look_up)
    monkeypatch.setattr(fetching.socket, "create_connection", connect)
    handler.connected = connected  # type: ignore[attr-defined]
    yield handler
    handler.release.set()
    server.shutdown()
    server.server_close()
    thread.join()


def test_a_picture_of_an_allowed_host(site: Any) -> None:
    assert fetch("http://pictures.example/picture?a=1", ["pictures.example"]) == PICTURE
    assert site.asked == [("/picture?a=1", "pictures.example")]
    assert fetch("http://CDN.example.org:8080/picture", ["*.Example.org"]) == PICTURE
    assert site.connected == ["127.0.0.1", "93.184.216.34"]


def test_hosts_are_allowed_by_name() -> None:
    assert is_allowed("a.example", ["a.example"])
    assert is_allowed("b.a.example.", ["*.a.example"])
    assert not is_allowed("a.example", ["*.a.example"])
    assert not is_allowed("xa.example", ["*.a.example", "a.example"])
    assert not is_allowed("a.example.evil", ["a.example", "*.example"])
    assert not is_allowed("a.example", [])


@pytest.mark.parametrize("host", [one for one in NAMES if one not in ("pictures.example", "cdn.example.org")])
def test_an_address_of_the_local_network_is_not_asked(site: Any, host: str) -> None:
    with pytest.raises(ConfigError, match="an address that is not public"):
        fetch(f"http://{host}/picture", ["*.example.org"])
    assert site.connected == []
    assert fetch(f"http://{host}/picture", [host]) == PICTURE  # named itself


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("http://other.example/picture", "pictures are not fetched from other.example: it is not in"),
        ("http://pictures.example@other.example/picture", "a user's name"),
        ("http://user@pictures.example/picture", "a user's name"),
        ("file:///etc/passwd", "begins with data:, http: or https:"),
        ("ftp://pictures.example/picture", "begins with data:, http: or https:"),
        ("gopher://pictures.example/", "begins with data:, http: or https:"),
        ("//pictures.example/picture", "begins with data:, http: or https:"),
        ("http:///picture", "has no host"),
        ("http://pictures.example:99999/", "cannot be read"),
        ("http://pictures.example/a b", "spaces"),
        ("http://pictures.example/\r\nX: y", "spaces"),
        ("http://gone.example.org/picture", "is not known"),
        ("http://pictures.example/status/404", "with status 404"),
        ("http://pictures.example/status/304", "with status 304"),
        ("http://pictures.example/long", "has 1099511627776 bytes"),
        ("http://pictures.example/endless", "more than 67108864 bytes"),
        ("http://pictures.example/short", "ends after 3 of 100 bytes"),
        ("http://pictures.example/again/4", "redirects more than 3 times"),
        ("http://pictures.example/to/http://other.example/picture", "not fetched from other.example"),
        ("http://pictures.example/to/http://inside.example.org/picture", "an address that is not public"),
        ("http://pictures.example/to/file:///etc/passwd", "begins with data:, http: or https:"),
    ],
)
def test_what_is_refused(site: Any, url: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        fetch(url, ["pictures.example", "*.example.org"])


def test_redirects_are_followed(site: Any) -> None:
    assert fetch("http://pictures.example/again/3", ["pictures.example"]) == PICTURE
    assert fetch("http://pictures.example/to/http://cdn.example.org/picture", ["pictures.example", "*.example.org"])
    assert site.asked[-1] == ("/picture", "cdn.example.org")


def test_an_answer_that_never_ends_is_cut(site: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetching, "_SECONDS", 0.3)
    with pytest.raises(ConfigError, match="it takes more than 0 s"):
        fetch("http://pictures.example/never", ["pictures.example"])


def test_none_without_names() -> None:
    with pytest.raises(ConfigError, match="name its host in --allowed_image_hosts"):
        fetch("https://pictures.example/a.png")


@pytest.mark.parametrize(
    ("url", "data"),
    [
        ("data:image/png;base64,AAEC", b"\0\1\2"),
        ("DATA:;BASE64,AAEC", b"\0\1\2"),
        ("data:image/png;base64,AA\nEC", b"\0\1\2"),
        ("data:,a%20b", b"a b"),
        ("data:image/png;base64,%2B%2f%2B%2F", b"\xfb\xff\xbf"),
        ("data:image/png;base64,-_-_", b"\xfb\xff\xbf"),
        ("data:image/png;base64,AAE%3D", b"\0\1"),
        ("data:image/png;base64,AAE", b"\0\1"),
    ],
)
def test_data_urls(url: str, data: bytes) -> None:
    assert fetch(url) == data


@pytest.mark.parametrize("url", ["data:image/png;base64", "data:;base64,A", "data:;base64,AA*C", "data:;base64,AAE=="])
def test_data_urls_that_are_none(url: str) -> None:
    with pytest.raises(ConfigError, match="data URL"):
        fetch(url)


class Reader:
    """Takes anything for a picture, and finds it again while it is not told to forget."""

    placeholder, position_token_ids = "", frozenset[int]()

    def __init__(self) -> None:
        self.pictures = dict[tuple[bytes, str | None], ReadPicture]()

    def read(self, data: bytes, detail: str | None = None) -> ReadPicture:
        return self.pictures.setdefault((key_of(data), detail), ReadPicture(key_of(data), "", 1, 1, 1))

    def known(self, key: bytes, detail: str | None = None) -> ReadPicture | None:
        return self.pictures.get((key, detail))


class Asking:
    """Pictures of one URL, as the turns of a conversation name it."""

    def __init__(self, control: str, path: str = "versioned"):
        self.url, self.now, self.reader = f"http://pictures.example/{path}/{control}", 0.0, Reader()
        self.fetched = FetchedPictures(["pictures.example"], lambda: self.now)

    def get(self, detail: str | None = None) -> bool:
        """Whether bytes had to be fetched."""
        found = self.fetched.get(self.url, self.reader, detail)
        if isinstance(found, bytes):
            self.reader.read(found, detail)
        return isinstance(found, bytes)


@pytest.mark.parametrize(("control", "seconds"), [("private", 300), ("max-age=20", 20), ("max-age=99999999", 86400)])
def test_a_picture_is_asked_for_again_after_a_while(control: str, seconds: int, site: Any) -> None:
    turns = Asking(control)
    assert [turns.get(), turns.get()] == [True, False]
    turns.now = seconds - 1.0
    assert not turns.get()
    assert site.questions == [None]
    turns.now = seconds
    assert [turns.get(), turns.get()] == [False, False]
    assert site.questions == [None, '"1"']
    turns.now += seconds - 1.0
    assert not turns.get()
    assert len(site.questions) == 2
    site.tag = '"2"'
    turns.now += 1.0
    assert [turns.get(), turns.get()] == [True, False]
    assert site.questions == [None, '"1"', '"1"']
    assert turns.reader.known(key_of(PICTURE + b'"2"')) is not None


@pytest.mark.parametrize("control", ["no-store", "no-cache,max-age=60"])
def test_who_wants_to_be_asked_is(control: str, site: Any) -> None:
    turns = Asking(control)
    assert [turns.get(), turns.get(), turns.get()] == [True, False, False]
    assert site.questions == [None, '"1"', '"1"']


def test_what_is_not_in_the_store_is_fetched(site: Any) -> None:
    turns = Asking("private")
    assert [turns.get(), turns.get("low"), turns.get("low"), turns.get()] == [True, True, False, False]
    turns.reader.pictures.clear()
    assert turns.get()
    assert site.questions == [None] * 3


def test_a_version_is_told_to_nobody_else(site: Any) -> None:
    """Of a redirect the target is asked, which may be another one each time."""
    turns = Asking("/versioned/no-cache", path="to")
    assert [turns.get(), turns.get()] == [True, False]
    assert site.questions == [None, '"1"']
    known = fetch_if_changed(turns.url, ["pictures.example"])
    assert known is not None
    assert fetch_if_changed("http://pictures.example/versioned/private", ["pictures.example"], known[1]) is not None
    assert site.questions == [None, '"1"', None, None]


def test_a_known_picture_of_a_host_that_is_not_allowed(site: Any) -> None:
    turns = Asking("private")
    assert turns.get()
    turns.fetched._allowed = ("other.example",)
    with pytest.raises(ConfigError, match="not fetched from pictures"):
        turns.get()
