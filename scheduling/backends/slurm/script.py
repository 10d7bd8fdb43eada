"""The batch script of an attempt.

It is written so that the attempt runs once even if Slurm starts it twice (a lost answer and a second submit, a
requeue behind our back): the first act is to create ``UUID.started`` in the output folder, which fails when it is
there. ``UUID.ended`` keeps the exit code for the time when Slurm has forgotten the job, ``UUID.devices`` the devices,
which Slurm only tells while the job runs.

A stop is SIGTERM to the job's steps. The worker's shell only notes it and goes on waiting, so that the program it
started, which has got the signal too, can write its checkpoint within the grace period. slurmrestd v0.0.38 can only
signal steps, batch script and srun together, and srun takes SIGTERM as an order to kill its step at once. So over
slurmrestd SIGUSR1 is sent, which srun passes on; a watcher beside the program turns it into SIGTERM, once: it comes twice, from slurmstepd and by srun.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping
from uuid import UUID

from scheduling.backends.base import Rejected, StartCommand
from scheduling.backends.slurm.config import SlurmConfig
from scheduling.backends.slurm.transport import Group

#: Exit codes of the script itself (sysexits.h has 64 to 78; programs rarely use these two).
STARTED_TWICE = 76
CANNOT_RECORD = 73
WRONG_ACCOUNT = 77
NO_DIRECTORY = 72

_VARIABLE = re.compile(r"^[A-Za-z_][A-Za-z0-9_]*$")
#: Slurm passes the script in one message; slurm.conf's max_script_size is 4 MiB by default. One argument of a
#: program may have 128 KiB in Linux (MAX_ARG_STRLEN).
LONGEST_COMMAND = 120_000

_WORKER = r"""read -r _ _ _ _ group _ </proc/$$/stat
# All tasks of a step on a node share one process group (or each has its own): one of them signals it.
[ "$SLURM_LOCALID" = 0 ] || [ "$group" = $$ ] && pass_on='kill -TERM 0' || pass_on=:
(trap : TERM; trap "trap '' USR1; $pass_on" USR1; while :; do sleep 3600 & wait $!; done) >/dev/null 2>&1 &
watcher=$!
disown "$watcher"  # or the shell would report its end in the job's output
told=
trap told=1 TERM
trap '' USR1
export GPUPORTAL_WORKER=$((GPUPORTAL_FIRST_WORKER + SLURM_PROCID))
[ "$SLURM_LOCALID" != 0 ] || echo "$SLURMD_NODENAME ${SLURM_STEP_GPUS:-}" >>"$GPUPORTAL_RECORD.devices"
if [ "$GPUPORTAL_WORKERS_PER_NODE" -gt 1 ]; then
  for list in CUDA_VISIBLE_DEVICES ROCR_VISIBLE_DEVICES GPU_DEVICE_ORDINAL ZE_AFFINITY_MASK; do
    IFS=, read -ra devices <<<"${!list}"
    if [ "${#devices[@]}" -gt 1 ]; then
      devices=("${devices[@]:SLURM_LOCALID*GPUPORTAL_GPUS_PER_WORKER:GPUPORTAL_GPUS_PER_WORKER}")
      export "$list=$(IFS=,; echo "${devices[*]}")"
    fi
  done
fi
eval "$1"
code=$?
kill -KILL "$watcher" 2>/dev/null
if [ -n "$told" ] && [ "$code" -ne 0 ] && [ "$GPUPORTAL_WORKERS" -gt 1 ]; then
  # A worker that obeys early must not have the others killed within their grace period.
  echo "$code" >"$GPUPORTAL_RECORD.stopped.$GPUPORTAL_WORKER" && exit 0
fi
exit "$code"
"""

_HEAD = r"""#!/bin/bash
# GPU Portal: job {job}, attempt {attempt}.
{identity}GPUPORTAL_RECORD={record}
if ! (set -o noclobber; echo "$SLURM_JOB_ID $(date +%s)" >"$GPUPORTAL_RECORD.started") 2>/dev/null; then
  if [ -s "$GPUPORTAL_RECORD.started" ]; then
    echo "GPU Portal: this attempt has been started before; the second start does nothing."
    exit {twice}
  fi
  rm -f "$GPUPORTAL_RECORD.started"
  echo "GPU Portal: cannot write $GPUPORTAL_RECORD.started"
  exit {cannot}
fi
finish() {{ code=$?; echo "$code $(date +%s) $SLURM_JOB_ID" >"$GPUPORTAL_RECORD.ended"; exit "$code"; }}
trap finish EXIT
USER=$(id -un) LOGNAME=$(id -un) HOME=$(getent passwd "$(id -u)" | cut -d: -f6) SLURM_EXPORT_ENV=ALL
export USER LOGNAME HOME SLURM_EXPORT_ENV GPUPORTAL_RECORD
"""

_TAIL = r"""trap told=1 TERM USR1
wait_for() {
  local left=("${steps[@]}") code=0 one
  while [ "${#left[@]}" -gt 0 ]; do
    told=
    wait -n "${left[@]}"; one=$?
    [ -n "$told" ] && [ "$one" -gt 128 ] && continue  # a signal, not an end
    [ "$one" -gt "$code" ] && code=$one
    local running=() step
    for step in "${left[@]}"; do kill -0 "$step" 2>/dev/null && running+=("$step"); done
    # One part of the gang has failed: the others would wait for it for ever.
    [ "$one" -ne 0 ] && [ "${#running[@]}" -gt 0 ] && kill -TERM "${running[@]}" 2>/dev/null
    left=("${running[@]}")
  done
  return "$code"
}
wait_for; code=$?
if [ "$code" -eq 0 ]; then
  for file in "$GPUPORTAL_RECORD".stopped.*; do
    if [ -s "$file" ]; then read -r one <"$file"; [ "$one" -gt "$code" ] && code=$one; rm -f "$file"; fi
  done
fi
exit "$code"
"""


def record_path(config: SlurmConfig, attempt: UUID) -> str:
    return f"{config.output_directory.rstrip('/')}/{attempt}"


def output_path(config: SlurmConfig, attempt: UUID) -> str:
    return f"{record_path(config, attempt)}.log"


def batch_script(config: SlurmConfig, command: StartCommand, groups: tuple[Group, ...]) -> str:
    """Raises ``Rejected`` for a command, image or variable that cannot be passed on."""
    if len(command.command.encode()) > LONGEST_COMMAND:
        raise Rejected(
            f"the command has {len(command.command.encode())} bytes; at most {LONGEST_COMMAND} can be passed on"
        )
    if "\0" in command.command or "\0" in command.working_directory or "\0" in command.image:
        raise Rejected("command, image and working directory must not have NUL characters")
    if command.image and config.containers == "none":
        raise Rejected(
            f"the job asks for the image {command.image!r}, but no container runtime is set up for this cluster"
        )
    lines = [
        _HEAD.format(
            job=command.job_id,
            attempt=command.attempt,
            identity=_identity(config, command),
            record=shlex.quote(record_path(config, command.attempt)),
            twice=STARTED_TWICE,
            cannot=CANNOT_RECORD,
        )
    ]
    if config.login_profile:
        lines.append("if [ -r /etc/profile ]; then . /etc/profile; fi\n")
    for name, value in environment(config, command).items():
        lines.append(f"export {name}={shlex.quote(value)}\n")
    if config.checkpoint_directory:
        lines.append('mkdir -p -- "$GPUPORTAL_CHECKPOINT_DIR"\n')
    directory = shlex.quote(command.working_directory) if command.working_directory else '"$HOME"'
    lines.append(f"cd -- {directory} || exit {NO_DIRECTORY}\n")
    lines.append('[ -z "$SLURM_CPUS_PER_TASK" ] || export SRUN_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK\n')
    lines.append(f"export GPUPORTAL_HEAD_NODE=$SLURMD_NODENAME\nworker={shlex.quote(_WORKER)}\nsteps=()\n")
    first = 0
    for number, group in enumerate(groups):
        lines.append(_step(config, command, group, number if len(groups) > 1 else None, first))
        first += len(group.nodes) * group.workers_per_node
    return "".join([*lines, _TAIL])


def environment(config: SlurmConfig, command: StartCommand) -> Mapping[str, str]:
    """Everything the job finds beside Slurm's own variables. The job's own win over the portal's defaults."""
    found = {
        "GPUPORTAL_JOB": str(command.job_id),
        "GPUPORTAL_ATTEMPT": str(command.attempt),
        "GPUPORTAL_RESTART_COUNT": str(command.number - 1),
        "GPUPORTAL_WORKERS": str(len(command.slots)),
        "GPUPORTAL_GPUS_PER_WORKER": str(command.gpus_per_worker),
    }
    for name, value in command.environment.items():
        if not _VARIABLE.match(name):
            raise Rejected(f"{name!r} is no name for an environment variable (letters, digits, _; no digit first)")
        if "\0" in str(value):
            raise Rejected(f"the environment variable {name} has a NUL character in its value")
        found[name] = str(value)
    if config.checkpoint_directory:
        # The folder differs by cluster: the cluster's setting goes before the portal's.
        found["GPUPORTAL_CHECKPOINT_DIR"] = f"{config.checkpoint_directory.rstrip('/')}/{command.job_id}"
    return found


def _identity(config: SlurmConfig, command: StartCommand) -> str:
    """slurmrestd runs the job of an account it does not know as another one: such a job must do nothing."""
    if not config.personal:
        return ""
    account = shlex.quote(command.account)
    return (
        f'if [ "$(id -un)" != {account} ]; then echo "GPU Portal: not running as" {account}; exit {WRONG_ACCOUNT}; fi\n'
    )


def _step(config: SlurmConfig, command: StartCommand, group: Group, het_group: int | None, first: int) -> str:
    workers = len(group.nodes) * group.workers_per_node
    words = ["srun", f"--nodes={len(group.nodes)}", f"--ntasks={workers}", "--kill-on-bad-exit=1", "--export=ALL"]
    if het_group is not None:
        words.append(f"--het-group={het_group}")
    else:
        words.append(f"--ntasks-per-node={group.workers_per_node}")
    inner = command.command
    if command.image and config.containers == "pyxis":
        words.append(f"--container-image={command.image}")
    elif command.image:
        inner = f"exec apptainer exec --nv {shlex.quote(command.image)} /bin/bash -c {shlex.quote(command.command)}"
    call = " ".join(
        [*(shlex.quote(word) for word in words), "/bin/bash", "-c", '"$worker"', "gpuportal", shlex.quote(inner)]
    )
    return f"GPUPORTAL_FIRST_WORKER={first} GPUPORTAL_WORKERS_PER_NODE={group.workers_per_node} {call} &\nsteps+=($!)\n"
