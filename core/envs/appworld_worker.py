"""AppWorld as a program of the env `command` (see appworld.py). Runs where appworld is, and imports nothing of ours.

AppWorld keeps its databases and its clock in globals: one process plays one task at a time.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
from typing import Any

FENCE = re.compile(r"```(?:python|py)?[ \t]*\n(.*?)```", re.DOTALL)
INTRODUCTION = """\
I am your supervisor, {first_name} {last_name} (email {email}, phone {phone_number}). You act in my name in apps, by \
Python code: each of your messages holds one block

```python
CODE
```

which is run in one lasting session, and you see what it prints. `apis.APP.API(...)` calls an app. To find out what \
there is: `print(apis.api_docs.show_app_descriptions())`, `print(apis.api_docs.show_api_descriptions(app_name=...))`, \
`print(apis.api_docs.show_api_doc(app_name=..., api_name=...))`. My accounts and passwords: \
`print(apis.supervisor.show_account_passwords())`. When the task is done, call `apis.supervisor.complete_task()`, with \
`answer=...` where it asks for something.

The task: {instruction}"""


class AppTasks:
    """One task at a time."""

    def __init__(self) -> None:
        self._world: Any = None

    def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        """The answer to one request."""
        if request["op"] == "reset":
            return self._reset(request)
        if request["op"] == "step":
            return self._step(request["action"])
        return {"error": f"the env appworld has no {request['op']}"}

    def close(self) -> None:
        """Ends the task and removes what AppWorld wrote of it."""
        world, self._world = self._world, None
        if world is not None:
            folder = world.base_output_directory
            world.close()
            shutil.rmtree(folder, ignore_errors=True)

    def _reset(self, request: dict[str, Any]) -> dict[str, Any]:
        from appworld import AppWorld

        self.close()
        # The name becomes a folder below the data's root; the turns are counted by who calls us.
        name = f"strop-{os.getpid()}"
        task_id = request["task"]["world"]["task_id"]
        self._world = AppWorld(task_id=task_id, experiment_name=name, max_interactions=100_000)
        task = self._world.task
        person = {key: getattr(task.supervisor, key) for key in ("first_name", "last_name", "email", "phone_number")}
        return {"observation": INTRODUCTION.format(instruction=task.instruction, **person)}

    def _step(self, text: str) -> dict[str, Any]:
        blocks = FENCE.findall(text)
        if not blocks:
            return {"observation": "There is no block of Python in your message.", "valid": False}
        said = self._world.execute("\n".join(blocks))
        valid = not said.startswith("Execution failed.")
        if not self._world.task_completed():
            return {"observation": said, "valid": valid}
        tests = self._world.evaluate()
        assertions = [{"name": test["requirement"], "status": "passed"} for test in tests.passes]
        assertions += [{"name": test["requirement"], "status": "failed"} for test in tests.failures]
        return {
            "observation": said, "valid": valid, "done": True, "success": bool(tests.success), "assertions": assertions,
        }  # fmt: skip


def main() -> None:
    """Answers requests until stdin ends."""
    # What a library or a policy's code prints must not stand between the answers.
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    tasks = AppTasks()
    try:
        for line in sys.stdin:
            try:
                said = tasks.answer(json.loads(line))
            except Exception as error:  # noqa: BLE001 (told to who asked)
                said = {"error": f"{type(error).__name__}: {error}"}
            answers.write(json.dumps(said) + "\n")
            answers.flush()
    finally:
        tasks.close()


if __name__ == "__main__":
    main()
