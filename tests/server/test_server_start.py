"""Starting a server: the addresses it takes, and the reasons when it cannot."""

from __future__ import annotations

import re
import socket
from pathlib import Path
from typing import Any

import pytest

from shmlane.errors import ServerStartFailed, UsageError
from shmlane.ports import HeldPort
from shmlane.server import TritonServer, demo_models, managed
from tests.machine import is_running, write_model, write_program
from tests.unit.loopback import is_kept

# --- addresses ------------------------------------------------------------------------


@pytest.mark.parametrize("which", ["http_port", "grpc_port"])
def test_a_taken_port_is_refused_by_number(which: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as holder:
        port = holder.getsockname()[1]
        server = TritonServer(**{which: port})
        with pytest.raises(ServerStartFailed, match=f"port {port}"):
            server.start()
    assert not server.is_alive


@pytest.mark.parametrize("which", ["http_port", "grpc_port"])
@pytest.mark.parametrize("port", [99999, 65536, -1, "8000", 80.0, None, True])
def test_what_is_no_port_is_refused(which: str, port: Any) -> None:
    with pytest.raises(UsageError, match=f"{which}={port!r} is not a port") as caught:
        TritonServer(**{which: port})
    assert "0 for any free port" in caught.value.hint


def test_chosen_ports_are_used() -> None:
    http, grpc = HeldPort(), HeldPort()
    with TritonServer(http_port=http.port, grpc_port=grpc.port) as server:
        assert server.http_url == f"127.0.0.1:{http.port}"
        assert server.grpc_url == f"127.0.0.1:{grpc.port}"


def test_nobody_is_given_the_ports_of_a_server_that_is_away() -> None:
    server = TritonServer()
    server.start()
    server.kill()
    assert is_kept(server.http_url)
    assert is_kept(server.grpc_url)
    server.start()
    server.stop()
    assert is_kept(server.http_url)


def test_one_chosen_port_goes_with_one_that_was_given() -> None:
    http = HeldPort()
    with TritonServer(http_port=http.port) as server:
        assert server.http_url == f"127.0.0.1:{http.port}"
        assert server.call("/v2/health/ready")[0] == 200


def test_a_free_port_that_is_taken_meanwhile_is_chosen_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = managed.find_installation().executable
    said = "Socket '127.0.0.1:1' already in use"
    lost_the_race = f'[ -e {tmp_path}/once ] || {{ touch {tmp_path}/once; echo "{said}"'
    program = write_program(
        tmp_path / "tritonserver", f'{lost_the_race}; exit 1; }}\nexec {real} "$@"'
    )
    monkeypatch.setenv("SHMLANE_TRITONSERVER", str(program))
    with TritonServer() as server:
        assert said in server.log_text()
        assert server.call("/v2/health/ready")[0] == 200


def test_the_socket_of_a_dead_server_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "http.sock"
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(path))
    with TritonServer(unix_socket=path) as server:
        assert server.call("/v2/health/ready")[0] == 200
    assert not path.exists()


def test_a_socket_in_use_is_left_to_its_owner(tmp_path: Path) -> None:
    path = tmp_path / "http.sock"
    with socket.socket(socket.AF_UNIX) as living:
        living.bind(str(path))
        living.listen()
        with pytest.raises(ServerStartFailed, match="another process listens"):
            TritonServer(unix_socket=path).start()
        assert path.exists()


def test_a_file_is_not_taken_for_a_socket(tmp_path: Path) -> None:
    path = tmp_path / "http.sock"
    path.write_text("precious")
    with pytest.raises(UsageError, match="is not a socket"):
        TritonServer(unix_socket=path).start()
    assert path.read_text() == "precious"


def test_a_socket_path_beyond_the_kernels_limit_is_refused() -> None:
    with pytest.raises(UsageError, match=r"has 108 bytes.*107") as caught:
        TritonServer(unix_socket="/tmp/" + "é" * 51 + "s")
    assert caught.value.context == {"length": 108, "limit": 107}


# --- failing to start -----------------------------------------------------------------


def test_a_model_that_does_not_load_is_told_with_triton_s_reason(
    tmp_path: Path,
) -> None:
    write_model(tmp_path, config='backend: "no_such_backend"')
    server = TritonServer(tmp_path)
    with pytest.raises(ServerStartFailed) as caught:
        server.start()
    assert "no_such_backend" in str(caught.value)
    assert str(server.log_path) in str(caught.value)
    assert "failed to load all models" in str(caught.value.context["log"])
    assert not server.is_alive


def test_a_missing_repository_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=f"{tmp_path}/models is not a folder"):
        TritonServer(tmp_path / "models").start()


def test_a_repository_without_models_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "config.pbtxt").touch()
    with pytest.raises(UsageError, match=f"{tmp_path} has no models in it"):
        TritonServer(tmp_path).start()


def test_a_repository_may_be_filled_once_the_server_runs(tmp_path: Path) -> None:
    arguments = ["--model-control-mode=explicit"]
    with TritonServer(tmp_path, extra_args=arguments) as server:
        assert server.model_names() == []


@pytest.mark.parametrize("options", ["--log-verbose=1", b"-v", 5, None, [1], [None]])
def test_options_are_a_list_of_texts(options: Any) -> None:
    with pytest.raises(UsageError, match=r"is not a list of texts.* Give a list, as"):
        TritonServer(extra_args=options)


@pytest.mark.parametrize(
    ("option", "reason"),
    [
        ("--no-such-option", "unrecognized option '--no-such-option'"),
        ("--strict-readiness=maybe", 'Bad option: "--strict-readiness"'),
        ("--http-port=many", "Invalid option value. Got many"),
        ("--backend-config=python", "--backend-config option format is"),
        ("resnet50", "Unexpected argument: resnet50"),
    ],
)
def test_a_bad_option_is_told_as_the_server_puts_it(option: str, reason: str) -> None:
    with pytest.raises(ServerStartFailed, match=re.escape(reason)) as caught:
        TritonServer(extra_args=[option]).start()
    assert "some/all models" not in str(caught.value), "its page of options is left out"


def test_a_server_that_never_gets_ready_is_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = f"echo $$ > {tmp_path}/pid; echo loading; exec sleep 60"
    program = write_program(tmp_path / "tritonserver", script)
    monkeypatch.setenv("SHMLANE_TRITONSERVER", str(program))
    with pytest.raises(ServerStartFailed, match=r"not ready after 1 s(.|\n)*loading"):
        TritonServer(start_timeout=1.0).start()
    assert not is_running(int((tmp_path / "pid").read_text()))


def test_a_python_backend_that_hands_out_wrong_data_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The wheel's backend under NumPy 2 gives models wrong numbers, silently."""
    numpy_2 = managed.isolated_python("numpy-2", ["numpy==2.2.6"])
    installation = managed.find_installation()
    environment = installation.environment(python_models=True)
    backends = " ".join(installation.arguments(python_models=True))
    program = write_program(
        tmp_path / "tritonserver",
        f"export PATH={numpy_2.parent}:$PATH "
        f"LD_LIBRARY_PATH={environment['LD_LIBRARY_PATH']}\n"
        f'exec {installation.executable} {backends} "$@"',
    )
    monkeypatch.setenv("SHMLANE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("SHMLANE_TRITONSERVER", str(program))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PATH", "/nowhere")
        python_models = demo_models("identity")
    with pytest.raises(ServerStartFailed, match=r"wrong data.*NumPy 2.*numpy<2"):
        TritonServer(python_models).start()
