#!/bin/bash

first=%first
module load %modules
%setup
%{gpu}export XLA_CLIENT_MEM_FRACTION=${XLA_CLIENT_MEM_FRACTION:-.95}
export NCCL_SOCKET_IFNAME=%interface
export JAX_COORDINATOR_ADDRESS="$first:20480"
%{once}%command
%{again}for attempt in $(seq 3); do
%{again}  %command
%{again}  status=$?
%{again}  case $status in
%{again}    0) exit 0 ;;
%{again}    1 | 2) exit $status ;;  # a refusal: it would be the same again
%{again}    143) exit 143 ;;  # asked to stop: saved
%{again}  esac
%{again}done
%{again}exit $status
