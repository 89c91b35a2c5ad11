"""Stages of a move at which tests stop it, to kill somebody there. Only with `cluster.debug`.

A file `SESSION.STAGE` in the folder `move-stages` of the state directory stops the moves of that session when they come
to that stage, until the file is gone; `SESSION.STAGE.reached` says that one has.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Final, Literal

from remora.platform.base.ids import SessionId

#: precopy: the target copies what is sealed. freeze: the standby is ready, and the source is about to be stopped. tail:
#: the source stands still, its last blocks are known. commit: the standby is the request's attempt, and about to hear
#: of it. release: its first token is here, and the source still has its blocks.
Stage = Literal["precopy", "freeze", "tail", "commit", "release"]
#: A test that has forgotten its file does not stop a move for ever.
MAX_STOP_S: Final = 60.0
#: Of the state directory.
STAGES_FOLDER: Final = "move-stages"
_POLL_S: Final = 0.01


class MoveStages:
    """Of one router."""

    def __init__(self, folder: Path | None) -> None:
        """`folder`: None where nothing is ever stopped."""
        self._folder = folder

    async def reach(self, stage: Stage, session_id: SessionId | None) -> None:
        """Returns at once, or when the stop is lifted."""
        if self._folder is None or session_id is None or not self._folder.is_dir():
            return
        name = f"{session_id}.{stage}"
        for stop in [path for path in self._folder.iterdir() if path.name == name]:
            stop.with_name(f"{name}.reached").touch()
            for _ in range(int(MAX_STOP_S / _POLL_S)):
                if not stop.exists():
                    break
                await asyncio.sleep(_POLL_S)
