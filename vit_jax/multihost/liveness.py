"""The watchdog of this process: what the parts of a run tell it, without being handed it."""

from __future__ import annotations

from vit_jax.multihost.watchdog import Watchdog

watchdog = Watchdog()  # watches nobody until `start`

start = watchdog.start
stop = watchdog.stop
leave = watchdog.leave
expect_progress = watchdog.expect_progress
note = watchdog.note
fail = watchdog.fail
wait_for_verdict = watchdog.wait_for_verdict
