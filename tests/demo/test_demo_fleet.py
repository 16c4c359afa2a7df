"""The fleet command before a scripted gateway (an HTTP server that answers as the expert would)."""

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from taktline_demo.environment import ReachEnvironment
from taktline_demo.expert import expert_chunk
from taktline_demo.fleet.processes import FleetOptions, check_policy, run_fleet
from taktline_demo.task import CONTROL_PERIOD_S, HORIZON
from taktline_protocol.codecs import MediaType, decode_observation, encode, error_body
from taktline_protocol.errors import ErrorCode, TaktlineError
from taktline_protocol.messages import ActionChunk, Array, PolicyInfo, Timings
from typer.testing import CliRunner

INFO = PolicyInfo(
    policy="scripted",
    family="pi05",
    revision="r1",
    ready=True,
    cameras=("scene", "wrist"),
    state_dim=4,
    action_dim=4,
    horizon=HORIZON,
    dt_s=CONTROL_PERIOD_S,
)


class ScriptedGateway:
    """Serves one policy; knows the blocks because it knows that robot `arm-N` runs episode N - 1."""

    def __init__(self, info=INFO, refuse=None):
        self.info, self.refuse, self.observations = info, refuse, []
        gateway = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self):
                self.answer(200, gateway.info)

            def do_POST(self):
                body = self.rfile.read(int(self.headers["content-length"]))
                observation = decode_observation(body, MediaType.MSGPACK)
                gateway.observations.append(observation)
                if gateway.refuse is not None:
                    self.answer(gateway.refuse.http_status, error_body(gateway.refuse))
                else:
                    self.answer(200, gateway.chunk(observation))

            def answer(self, status, message):
                content = encode(message, MediaType.MSGPACK)
                self.send_response(status)
                self.send_header("content-type", MediaType.MSGPACK.value)
                self.send_header("content-length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)

            def log_message(self, *arguments):
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def chunk(self, observation):
        environment = ReachEnvironment()
        environment.reset(int(observation.robot_id.removeprefix("arm-")) - 1)
        target = environment.target(environment.goal)
        timings = Timings(observe_ms=0.0, transfer_ms=1.0, queue_ms=2.0, inference_ms=30.0, actuate_ms=0.0)
        return ActionChunk(
            request_id="r",
            policy="scripted",
            revision="r1",
            robot_id=observation.robot_id,
            seq=observation.seq,
            actions=Array.from_numpy(expert_chunk(observation.state.to_numpy(), target)),
            dt_s=CONTROL_PERIOD_S,
            captured_at=observation.captured_at,
            valid_until=observation.captured_at + HORIZON * CONTROL_PERIOD_S,
            timings=timings,
            margin_ms=500.0,
            batch_size=1,
        )


@pytest.fixture
def serve():
    started = []

    def start(**options):
        gateway = ScriptedGateway(**options)
        started.append(gateway)
        return gateway

    yield start
    for gateway in started:
        gateway.server.shutdown()


def changed(**changes):
    return PolicyInfo(**{name: getattr(INFO, name) for name in INFO.__struct_fields__} | changes)


@pytest.mark.slow
def test_command_runs_robots_and_writes_report_table_and_json(serve, tmp_path):
    from taktline_demo.cli import app

    gateway = serve()
    arguments = ["fleet", "--url", gateway.url, "--policy", "scripted", "--robots", "2", "--episodes", "1"]
    outputs = ["--report", str(tmp_path / "out" / "report.html"), "--json", str(tmp_path / "out" / "fleet.json")]
    result = CliRunner().invoke(app, [*arguments, *outputs])
    assert result.exit_code == 0, result.output
    assert "2 of 2 episodes reached the named block" in " ".join(result.output.split())
    data = json.loads((tmp_path / "out" / "fleet.json").read_text())
    assert [robot["robot"] for robot in data["robots"]] == ["arm-1", "arm-2"]
    assert data["successes"] == 2
    for robot in data["robots"]:
        assert robot["requests"] >= len(robot["chunks"]) >= 2
        assert all(chunk["inference_ms"] == 30.0 for chunk in robot["chunks"])
    report = (tmp_path / "out" / "report.html").read_text()
    assert report.count("data:image/jpeg;base64,") == 2
    assert {observation.robot_id for observation in gateway.observations} == {"arm-1", "arm-2"}
    assert all(set(observation.images) == {"scene", "wrist"} for observation in gateway.observations)
    assert all(observation.budget_ms > 0 for observation in gateway.observations)


@pytest.mark.slow
def test_one_robot_s_hopeless_refusal_ends_the_fleet(serve):
    refusal = TaktlineError(ErrorCode.ROBOT_CONFLICT, "scripted conflict", "rename the robot")
    gateway = serve(refuse=refusal)
    with pytest.raises(TaktlineError) as caught:
        run_fleet(FleetOptions(gateway.url, "scripted", 1, 1, 0))
    assert caught.value.code is ErrorCode.ROBOT_CONFLICT
    assert "arm-1" in caught.value.message


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ({"ready": False}, ErrorCode.WORKER_UNAVAILABLE),
        ({"cameras": ("front",)}, ErrorCode.CONFIG_INVALID),
        ({"state_dim": 7}, ErrorCode.CONFIG_INVALID),
        ({"dt_s": 0.02}, ErrorCode.CONFIG_INVALID),
    ],
)
def test_a_policy_for_another_robot_is_refused_before_any_robot_starts(serve, changes, code):
    gateway = serve(info=changed(**changes))
    with pytest.raises(TaktlineError) as caught:
        check_policy(FleetOptions(gateway.url, "scripted", 4, 1, 0))
    assert caught.value.code is code
    assert gateway.observations == []


def test_no_gateway_is_one_line_and_a_status(capsys, monkeypatch):
    from taktline_demo.cli import main

    monkeypatch.setattr("sys.argv", ["taktline-demo", "fleet", "--url", "http://127.0.0.1:9", "--robots", "1"])
    with pytest.raises(SystemExit) as caught:
        main()
    assert caught.value.code == 1
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert "gateway_unreachable" in line


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["evaluate"], "--checkpoint or --url"),
        (["evaluate", "--checkpoint", "/nowhere"], "model.safetensors"),
        (["train", "--data", "/nowhere.npz", "--out", "/nowhere"], "taktline-demo record"),
    ],
)
def test_wrong_use_says_what_to_do(capsys, monkeypatch, arguments, words):
    from taktline_demo.cli import main

    monkeypatch.setattr("sys.argv", ["taktline-demo", *arguments])
    with pytest.raises(SystemExit) as caught:
        main()
    assert caught.value.code == 1
    assert words in capsys.readouterr().err
