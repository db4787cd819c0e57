"""Models from the hub, against a small imitation of it on the loopback device."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from numpy.typing import NDArray
from safetensors.numpy import save

from furnace.checkpoint import CheckpointError
from furnace.checkpoint.hub import HubModel, choose_files, parse_hub_model

CLIENT = Path(__file__).with_name("hub_client.py")
REPOSITORY = "acme/small"


@dataclass
class Hub:
    """What the imitated hub holds: for each repository, files by revision; and what it was asked."""

    url: str = ""
    repositories: dict[str, dict[str, dict[str, bytes]]] = field(default_factory=dict)
    gated: set[str] = field(default_factory=set)
    token: str | None = None
    requests: list[str] = field(default_factory=list)
    tokens_seen: set[str] = field(default_factory=set)

    def commit(self, repository: str, revision: str) -> str | None:
        if revision in self.repositories[repository]:
            return hashlib.sha1(f"{repository}@{revision}".encode(), usedforsecurity=False).hexdigest()
        named = {self.commit(repository, name): name for name in self.repositories[repository]}
        return revision if revision in named else None

    def files(self, repository: str, commit: str) -> dict[str, bytes]:
        return next(f for name, f in self.repositories[repository].items() if self.commit(repository, name) == commit)


def handler_for(hub: Hub) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, format: str, *args: Any) -> None:
            pass

        def answer(self, status: int, body: bytes = b"", **headers: str) -> None:
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            for name, value in headers.items():
                self.send_header(name.replace("_", "-"), value)
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(body)

        def do_HEAD(self) -> None:
            self.do_GET()

        def do_GET(self) -> None:
            hub.requests.append(self.path)
            if token := self.headers.get("Authorization"):
                hub.tokens_seen.add(token)
            path = self.path.partition("?")[0]
            parts = path.removeprefix("/api/models/").strip("/").split("/")
            repository = "/".join(parts[:2])
            if repository not in hub.repositories:
                self.answer(401 if hub.token is None else 404, X_Error_Code="RepoNotFound")
                return
            if repository in hub.gated and self.headers.get("Authorization") != f"Bearer {hub.token}":
                self.answer(403, X_Error_Code="GatedRepo", X_Error_Message="gated")
                return
            revision = parts[3] if len(parts) > 3 else "main"
            commit = hub.commit(repository, revision)
            if commit is None:
                self.answer(404, X_Error_Code="RevisionNotFound")
                return
            files = hub.files(repository, commit)
            if path.startswith("/api/models/"):
                self.api(parts[2] if len(parts) > 2 else "revision", repository, commit, files)
                return
            content = files.get("/".join(parts[4:]))
            if content is None:
                self.answer(404, X_Error_Code="EntryNotFound", X_Repo_Commit=commit)
                return
            self.answer(200, content, ETag=f'"{blob_id(content)}"', X_Repo_Commit=commit)

        def api(self, what: str, repository: str, commit: str, files: dict[str, bytes]) -> None:
            if what == "tree":
                body: Any = [
                    {"type": "file", "path": name, "size": len(content), "oid": blob_id(content)}
                    for name, content in files.items()
                ]
            else:
                body = {"id": repository, "sha": commit, "siblings": [{"rfilename": name} for name in files]}
            self.answer(200, json.dumps(body).encode(), Content_Type="application/json")

    return Handler


def blob_id(content: bytes) -> str:
    return hashlib.sha1(content, usedforsecurity=False).hexdigest()


@pytest.fixture
def hub(llama_config: dict[str, object], llama_weights: dict[str, NDArray[Any]]) -> Iterator[Hub]:
    """A hub with one model in two revisions."""
    hub = Hub()

    def model(first: float) -> dict[str, bytes]:
        llama_weights["model.norm.weight"][0] = first
        return {
            "config.json": json.dumps(llama_config).encode(),
            "model.safetensors": save(llama_weights),
            "tokenizer.json": b"{}",
            "pytorch_model.bin": b"pickle",
            "modeling_small.py": b"raise SystemExit",
            "onnx/model.safetensors": b"another form",
        }

    hub.repositories[REPOSITORY] = {"main": model(1.0), "v2": model(2.0)}
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler_for(hub))
    hub.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield hub
    server.shutdown()
    server.server_close()
    thread.join()


Opener = Callable[..., dict[str, Any]]


@pytest.fixture
def open_model(hub: Hub, tmp_path: Path) -> Opener:
    """Open a model in a fresh interpreter."""

    def open_model(model: str, *own_weights: str, **settings: str) -> dict[str, Any]:
        environment = {
            "PATH": os.environ["PATH"],
            "PYTHONPATH": os.pathsep.join(sys.path),
            "HF_HOME": str(tmp_path / "hf-home"),
            "HF_ENDPOINT": hub.url,
            "HF_HUB_ETAG_TIMEOUT": "60",
            "HF_HUB_DOWNLOAD_TIMEOUT": "60",
        } | settings
        done = subprocess.run(
            [sys.executable, CLIENT, model, *own_weights],
            env=environment,
            cwd=tmp_path,
            capture_output=True,
            text=True,
            check=True,
            timeout=240,
        )
        answer: dict[str, Any] = json.loads(done.stdout)
        return answer | {"stderr": done.stderr}

    return open_model


def test_a_model_is_fetched_and_then_served_from_the_cache(hub: Hub, open_model: Opener) -> None:
    first = open_model(REPOSITORY)
    assert (first["name"], first["first"], first["tokenizer"], first["gguf"]) == (REPOSITORY, 1.0, True, False)
    assert "%" not in first["stderr"], "a progress bar went to something that is no terminal"
    fetched = {path.rsplit("/", 1)[1] for path in hub.requests if "/resolve/" in path}
    assert fetched == {"config.json", "model.safetensors", "tokenizer.json"}
    hub.requests.clear()
    offline = open_model(REPOSITORY, HF_HUB_OFFLINE="1")
    assert offline["first"] == 1.0
    assert not hub.requests
    unreachable = open_model(REPOSITORY, HF_ENDPOINT="http://127.0.0.1:9")
    assert unreachable["first"] == 1.0


def test_weights_of_a_format_of_the_callers_own_are_fetched_instead_of_ours(hub: Hub, open_model: Opener) -> None:
    own = ("graph.xml", "graph.bin")
    assert open_model(REPOSITORY, *own)["files"] == ["config.json", "model.safetensors", "tokenizer.json"]
    both = hub.repositories[REPOSITORY]["main"] | dict.fromkeys((*own, "other.xml"), b"own")
    hub.repositories["acme/both"] = {"main": both}
    assert open_model("acme/both", *own) == {
        "name": "acme/both",
        "files": ["config.json", "graph.bin", "graph.xml", "tokenizer.json"],
        "stderr": "",
    }
    assert open_model("acme/both", *own, HF_HUB_OFFLINE="1")["files"][1] == "graph.bin"


def test_a_revision_is_another_model(open_model: Opener) -> None:
    assert open_model(f"{REPOSITORY}@v2")["first"] == 2.0
    assert "no revision 'v3'" in open_model(f"{REPOSITORY}@v3")["error"]


def test_a_gated_model_asks_for_a_token_and_opens_with_it(hub: Hub, open_model: Opener) -> None:
    hub.gated.add(REPOSITORY)
    hub.token = "hf_secret"
    refused = open_model(REPOSITORY)
    assert "gated" in refused["error"]
    assert "HF_TOKEN" in refused["error"]
    assert open_model(REPOSITORY, HF_TOKEN="hf_secret")["first"] == 1.0
    assert hub.tokens_seen == {"Bearer hf_secret"}


def test_one_gguf_file_of_several_is_chosen_by_name(hub: Hub, open_model: Opener, gguf_bytes: Any) -> None:
    empty = gguf_bytes.file([gguf_bytes.entry("general.architecture", 8, gguf_bytes.text("unheard-of"))])
    hub.repositories["acme/quantized"] = {"main": {"a.gguf": empty, "b.gguf": empty}}
    assert "acme/quantized/FILE: a.gguf, b.gguf" in open_model("acme/quantized")["error"]
    chosen = open_model("acme/quantized/b.gguf")["error"]
    assert "b.gguf: the architecture 'unheard-of' is not supported" in chosen
    assert "no file 'c.gguf'" in open_model("acme/quantized/c.gguf")["error"]
    assert "no file 'a.gguf'" in open_model("acme/quantized/a.gguf", HF_HUB_OFFLINE="1")["error"]
    assert open_model("acme/quantized/b.gguf", HF_HUB_OFFLINE="1")["error"] == chosen


def test_what_the_hub_does_not_have_is_a_clean_error(open_model: Opener) -> None:
    answer = open_model("acme/nothing")
    assert "acme/nothing" in answer["error"]
    assert "no such model, or a private one" in answer["error"]
    assert "\n" not in answer["error"]


def test_without_a_network_the_error_says_what_to_do(open_model: Opener) -> None:
    offline = open_model(REPOSITORY, HF_HUB_OFFLINE="1")
    assert "HF_HUB_OFFLINE is set" in offline["error"]
    unreachable = open_model(REPOSITORY, HF_ENDPOINT="http://127.0.0.1:9")
    assert "can't be reached" in unreachable["error"]
    assert "\n" not in unreachable["error"]


def test_a_path_that_exists_wins_over_the_hub(
    hub: Hub, open_model: Opener, tmp_path: Path, llama_directory: Path
) -> None:
    (tmp_path / "acme").mkdir()
    llama_directory.rename(tmp_path / "acme" / "small")
    assert open_model(REPOSITORY)["name"] == "small"
    assert not hub.requests


@pytest.mark.parametrize(
    ("text", "model"),
    [
        ("org/name", HubModel("org/name", None, "main")),
        ("org/name@refs/pr/1", HubModel("org/name", None, "refs/pr/1")),
        ("org/name/file.Q4_1.gguf", HubModel("org/name", "file.Q4_1.gguf", "main")),
        ("org/name/sub/file.gguf@v1", HubModel("org/name", "sub/file.gguf", "v1")),
        ("org", None),
        ("org/name/file.bin", None),
        ("org/name/../x.gguf", None),
        ("org/name@../../x", None),
        ("../name", None),
        ("org/na me", None),
        ("org/name@", None),
    ],
)
def test_hub_names_are_told_from_paths(text: str, model: HubModel | None) -> None:
    assert parse_hub_model(text) == model


def test_only_one_form_of_the_weights_is_fetched() -> None:
    model = HubModel("org/name", None, "main")
    sharded = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
    files = [*sharded, "model.safetensors.index.json", "consolidated.safetensors", "config.json", "x.bin", "a/b.json"]
    assert sorted(choose_files(model, files)) == sorted([*sharded, "model.safetensors.index.json", "config.json"])
    assert choose_files(model, ["a.gguf", "README.md"]) == ["a.gguf"]
    with pytest.raises(CheckpointError, match=r"several GGUF files.*a\.gguf, b\.gguf"):
        choose_files(model, ["a.gguf", "b.gguf"])
    assert choose_files(HubModel("org/name", "b.gguf", "main"), ["a.gguf", "b.gguf"]) == ["b.gguf"]
    with pytest.raises(CheckpointError, match=r"no file 'c\.gguf'; it has a\.gguf"):
        choose_files(HubModel("org/name", "c.gguf", "main"), ["a.gguf"])
    with pytest.raises(CheckpointError, match=r"neither model\.safetensors, nor"):
        choose_files(model, ["pytorch_model.bin"])


def test_weights_of_the_callers_own_are_taken_only_as_a_whole() -> None:
    model = HubModel("org/name", None, "main")
    own = ("graph.xml", "graph.bin")
    assert choose_files(model, ["a.gguf", "graph.xml", "sub/graph.bin"], own) == ["a.gguf"]
    assert choose_files(model, ["a.json", "a.gguf", *own], own) == ["a.json", *own]
    assert choose_files(HubModel("org/name", "a.gguf", "main"), ["a.gguf", *own], own) == ["a.gguf"]
    with pytest.raises(CheckpointError, match=r"neither graph\.xml, nor model\.safetensors, nor"):
        choose_files(model, ["graph.xml"], own)
