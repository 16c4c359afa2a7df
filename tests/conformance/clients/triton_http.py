"""The published Triton HTTP client, unmodified, which speaks the Open Inference Protocol. Prints JSON."""

import json
import sys

import numpy as np
import tritonclient.http as triton
from tritonclient.utils import InferenceServerException


def inputs(binary, text="go", front="image"):
    arrays = {
        front: ("UINT8", np.full((16, 16, 3), 30, np.uint8)),
        "wrist_image": ("UINT8", np.full((1, 16, 16, 3), 40, np.uint8)),
        "state": ("FP32", np.arange(8, dtype=np.float32)),
        "instruction": ("BYTES", np.array([text.encode()], dtype=np.object_)),
    }
    made = []
    for name, (datatype, array) in arrays.items():
        tensor = triton.InferInput(name, list(array.shape), datatype)
        tensor.set_data_from_numpy(array, binary_data=binary)
        made.append(tensor)
    return made


def infer(url, model):
    client = triton.InferenceServerClient(url)
    answers = []
    for binary in (True, False):
        wanted = [triton.InferRequestedOutput("actions", binary_data=binary)]
        result = client.infer(
            model, inputs(binary), outputs=wanted, request_id="r-7", parameters={"robot_id": "arm-7", "budget_ms": 4000}
        )
        actions = result.as_numpy("actions")
        answers.append({"shape": actions.shape, "dtype": str(actions.dtype), "first": actions[0].tolist()})
    said = []
    for wrong in (inputs(True, front="rear"), inputs(True, "fail"), inputs(False, " ")):
        try:
            client.infer(model, wrong)
            said.append(None)
        except InferenceServerException as error:
            said.append([error.status(), error.message()])
    try:
        client.get_model_metadata("absent")
    except InferenceServerException as error:
        said.append([error.status(), error.message()])
    return {
        "live": client.is_server_live(),
        "ready": client.is_server_ready(),
        "model_ready": client.is_model_ready(model),
        "absent_ready": client.is_model_ready("absent"),
        "server": client.get_server_metadata(),
        "metadata": client.get_model_metadata(model),
        "response": result.get_response(),
        "answers": answers,
        "said": said,
    }


if __name__ == "__main__":
    scenario, *arguments = sys.argv[1:]
    print(json.dumps(globals()[scenario](*arguments)))
