#!/usr/bin/env bash
# Prove this installation on one GPU, in three parts of less than ten minutes each. Nothing is downloaded.
#
#   bash studies/gpu_day.sh 1    # is it right?  checks, tests, one rank of FSDP, embedded training, every credit method
#   bash studies/gpu_day.sh 2    # is it fast?   a training step of the 7B, and where its decoding goes
#   bash studies/gpu_day.sh 3    # race and kernel, packing, attention, a step of the 1.5B with its optimizer, peers
#
# A stage that fails, or takes longer than its limit, costs the others nothing. Logs go to $OUT (gpu_day). Last lines:
# one a stage, status, seconds and name, and one a check, PASS or FAIL; the exit status is 0 if every stage's is.
# $STATES may name a file of hidden states for the peers of part 3 (see studies/peers.py), $LIMIT the seconds of a part.
# The step of the 7B takes about 91 GB; a smaller GPU gets the 1.5B in its place. DEVICE=cpu rehearses with tiny sizes.
set -u
PART=${1:?part 1, 2 or 3}
cd "$(dirname "$0")/.." || exit 2
OUT=${OUT:-gpu_day}
mkdir -p "$OUT" || exit 2
export DEVICE=${DEVICE:-cuda} HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false PYTHONUNBUFFERED=1 PYTHONFAULTHANDLER=1
DEADLINE=$(($(date +%s) + ${LIMIT:-565}))
RUNS=$(mktemp -d)
SUMMARY=$OUT/summary-$PART.txt
rm -f "$OUT/part-$PART"-*.log
: > "$SUMMARY"

# stage SECONDS LOG NAME COMMAND...: never longer than SECONDS, nor than what is left of the part
stage() {
  local limit=$1 log=$OUT/part-$PART-$2.log name=$3 started left status
  shift 3
  started=$(date +%s)
  left=$((DEADLINE - started))
  [ "$limit" -gt "$left" ] && limit=$left
  printf '\n======== %s\n$ %s\n' "$name" "$*" >> "$log"
  status=skipped
  if [ "$limit" -ge 20 ]; then
    timeout --kill-after=5 "$limit" "$@" >> "$log" 2>&1
    status=$?
    [ $status = 124 ] || [ $status = 137 ] && status="over $limit s"
  fi
  printf 'status %-10s %4s s  %s\n' "$status" $(($(date +%s) - started)) "$name" | tee -a "$SUMMARY"
}

finish() {
  rm -rf "$RUNS"
  printf '\n'
  cat "$SUMMARY"
  grep -hE '^(PASS|FAIL) ' "$OUT/part-$PART"-*.log
  ! grep -qv '^status 0 ' "$SUMMARY"
  exit $?
}
trap finish EXIT

bench="python3 -m studies.bench --device $DEVICE"
check="python3 -m studies.gpu_checks" probe="python3 -m studies.gpu_probe"
size=7b small=1.5b step="--tokens 1000 --problems 32 --decode fast" embedded=""
peers="--tokens 1000 3000 --width 3584 --group 8 --pairs 256 --rounds 1 ${STATES:+--states $STATES}"
if [ "$DEVICE" = cpu ]; then
  size=tiny small=tiny step="--tokens 32 --problems 4 --decode fast" embedded=--smoke
  peers="--tokens 150 --width 32 --group 4 --pairs 8 --rounds 1"
else
  nvidia-smi > "$OUT/part-$PART-machine.log" 2>&1
  memory=$(nvidia-smi --query-gpu=memory.total --format=csv,noheader,nounits 2> /dev/null | head -n 1)  # MiB
  [ "${memory:-0}" -lt 95000 ] && size=1.5b
fi

case $PART in
1)
  # The embedded run takes the longest and is not timed: it goes beside the others.
  stage 480 embedded "embedded training" python3 train.py --device "$DEVICE" $embedded --out "$RUNS" &
  stage 60 checks "attention with masks" $check backends
  stage 120 checks "decoding and its graphs" $check decode
  stage 60 checks "packed rollouts" $check packing
  stage 120 checks "one rank of FSDP in bfloat16, --resume" $check fsdp
  stage 60 bench "bench --step --size tiny" $bench --step --size tiny --tokens 32 --problems 4 --group 4
  stage 100 bench "bench --step --size $small, small" $bench --step --size $small $step --tokens 64 --problems 8
  # The test files with cases for a GPU: decoding, scores and gradients, race, kernel, weights.
  stage 200 tests "pytest" python3 -m pytest -q -p no:cacheprovider $(grep -l '"no GPU"' tests/test_*.py)
  stage 240 checks "every credit method" $check methods
  wait
  grep -hE '^ *(1|20|40)/|accuracy|AUC' "$OUT/part-1-embedded.log" | cut -c 1-160
  ;;
2)
  stage 235 bench "bench --step --size $size" $bench --step --size $size --no-optimizer $step
  stage 160 decode "where decoding goes" $probe decode
  stage 140 cudnn "half of it with cuDNN's attention" \
    $probe step --device "$DEVICE" --size $size --no-optimizer $step --problems 16
  grep -hE '^\| |overhead|bottleneck|ceilings|^decode' "$OUT"/part-2-*.log
  ;;
3)
  stage 80 race "race and kernel" $probe race
  stage 80 passes "training passes, padded and packed" $probe passes
  stage 60 attention "attention of a decoding step" $probe attention
  stage 170 bench "bench --step --size $small, with its optimizer" $bench --step --size $small $step
  stage 240 peers "peers" $bench $peers
  grep -hE '^\| |^race|^training|^attention|solved to the end' "$OUT"/part-3-*.log
  ;;
esac
