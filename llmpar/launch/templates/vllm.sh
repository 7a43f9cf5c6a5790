#!/bin/bash
# On a node of the Ray cluster, with GPUs, and in its container if it runs in one: bash FILE
[ -n "$VLLM_API_KEY" ] || { echo "set VLLM_API_KEY, which clients must send, and start again" >&2; exit 1; }
module load %modules
%setup
export NCCL_SOCKET_IFNAME=%interface GLOO_SOCKET_IFNAME=%interface
export RAY_ADDRESS=${RAY_ADDRESS:-auto}
exec %command --host 127.0.0.1 --port "${PORT:-8000}"
