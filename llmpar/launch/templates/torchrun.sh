#!/bin/bash
# On each node: bash FILE. In a SLURM job: srun --ntasks-per-node=1 bash FILE
module load %modules
%setup
%{gpu}export XLA_CLIENT_MEM_FRACTION=${XLA_CLIENT_MEM_FRACTION:-.95}
export NCCL_SOCKET_IFNAME=%interface
first=%first
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1  # without it nodes that come back find no address
exec torchrun --nnodes=%nodes --nproc-per-node=%processes_per_node --max-restarts=%restarts --rdzv-backend=c10d --rdzv-endpoint="$first:29400" --rdzv-id=${SLURM_JOB_ID:-llmpar} --no-python -- %command
