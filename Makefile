# What CI runs, by name. `make check` is everything.
PYTHON ?= python
TYPES := build/types
EVERYTHING := build/durations_of_all.txt

.PHONY: check lint types test durations coverage structure slow everything nightly strict package \
    versions zoo corpus grid faults mutations fuzz failures ring window gpu regret soak references docs \
    picture

check: lint types test

lint:
	ruff check .
	ruff format --check .

# mypy reads folders as they import, so the rooms are linked together as the package.
types:
	rm -rf $(TYPES) && mkdir -p $(TYPES)/autoparallel
	ln -s $(addprefix $(CURDIR)/,$(filter-out %/__pycache__,$(wildcard api/*)) \
	    cost_model planner passes runtime) $(TYPES)/autoparallel/
	MYPYPATH=$(TYPES) mypy -p autoparallel

test:
	$(PYTHON) -m pytest -n 3

# The processor seconds of each test into build/durations.txt, and of each file into
# tests/durations.txt, by which a session begins with the longest; for a session with slow tests
# into tests/durations_of_all.txt what the last `make everything` measured, if it ran here.
durations:
	mkdir -p build
	$(PYTHON) -m pytest -n 3 --processor-seconds=build/durations.txt
	$(PYTHON) tests/support/durations.py build/durations.txt
	[ ! -e $(EVERYTHING) ] || \
	    $(PYTHON) tests/support/durations.py $(EVERYTHING) tests/durations_of_all.txt

# The lines of each package that the default suite runs, as a table.
coverage:
	$(PYTHON) tests/support/line_coverage.py

# Figures of the structure (sizes, import cycles, docstrings, words) beside their ceilings.
structure:
	$(PYTHON) tests/support/structure.py

slow:
	$(PYTHON) -m pytest -n 3 -m slow

# All tests, slow ones too; and all with the random suites at 500 cases each.
everything:
	mkdir -p build
	$(PYTHON) -m pytest -n 3 -m "slow or not slow" --processor-seconds=$(EVERYTHING)

nightly:
	$(PYTHON) -m pytest -n 3 -m "slow or not slow" --hypothesis-profile=nightly

# The rules of NCCL and CUDA, without a GPU: every schedule on models of every shape, and the
# runtime's own tests, on a process group that promises no more than these do.
STRICT := tests/runtime tests/test_verification.py \
    tests/test_verification_schedules.py tests/test_verification_branches.py \
    tests/test_verification_meshes.py tests/test_verification_asynchronous.py
strict:
	$(PYTHON) -m pytest -m "slow or not slow" tests/test_strict.py
	AUTOPARALLEL_TEST_BACKEND=strict $(PYTHON) -m pytest $(STRICT)

# Wheel and source distribution, built, installed in a new environment and used (3 minutes).
package:
	PYTHON=$(PYTHON) .ci/package

# The tests with other versions than constraints.txt pins; VERSIONS="2.11 newest" takes some.
versions:
	PYTHON=$(PYTHON) VERSIONS="$(VERSIONS)" .ci/versions

# Every architecture of tests/zoo, verified; writes benchmarks/zoo/README.md.
zoo:
	$(PYTHON) benchmarks/zoo/run.py

# Every case of the golden corpus, planned and compared with the committed plans.
corpus:
	$(PYTHON) benchmarks/corpus/run.py

# Many settings: no configuration of a simple grid is faster than the plan.
grid:
	$(PYTHON) benchmarks/planning/grid.py

# 2,000 damaged and hostile plans, clusters, options, indexes and databases.
mutations:
	$(PYTHON) -m pytest -n 3 --hypothesis-profile=nightly tests/api/test_mutations.py

# 50 deliberate faults, each of which a test of the default suite must notice.
faults:
	$(PYTHON) benchmarks/faults/run.py

# 1,000 random models under random plans on two ranks and 200 on four, compared with plain PyTorch;
# writes benchmarks/fuzz/README.md (at most 75 minutes).
fuzz:
	mkdir -p build
	$(PYTHON) -m benchmarks.fuzz --page benchmarks/fuzz/README.md --csv build/fuzz.csv

# Runs killed at 20 random points under every executor, and hosts that come and go (the latter in
# network namespaces: root).
failures:
	$(PYTHON) -m pytest -n 0 -m slow tests/runtime/test_restarts.py tests/runtime/test_hosts.py

# One layer of a long sequence by ring attention on eight ranks, compared with one device: 65,536
# positions in three minutes on two cores, and 16 times as long for POSITIONS=262144.
POSITIONS := 65536
LONG = --seq $(POSITIONS) --set seq=$(POSITIONS) --set n_layer=1 --set d_model=16 --set n_head=1
ring:
	mkdir -p build
	$(PYTHON) -m autoparallel plan examples/gpt.py --cluster cpu:8 --profile analytic $(LONG) \
	  --set vocab=32 --global-batch 1 --parallel cp=8 --allow ring -o build/ring.json
	$(PYTHON) -m autoparallel verify build/ring.json --timeout 7200

# Two steps of one layer with a sliding window over a million positions, on eight ranks.
window:
	mkdir -p build
	$(PYTHON) -m autoparallel plan hf:tests/models/window --cluster cpu:8 --profile analytic \
	  --seq 1048576 --global-batch 1 --parallel cp=8 -o build/window.json
	$(PYTHON) -m autoparallel run build/window.json --steps 2 --no-check-first-step

# On a machine with GPUs: the tests that need one, verified plans, profiles and training steps,
# into build/gpu.json. PARTS=step,verify runs some of them.
gpu:
	$(PYTHON) benchmarks/gpu/run.py $(if $(PARTS),--parts $(PARTS))

# Plans and every configuration of a grid, measured on emulated clusters (root; about 30 minutes):
# benchmarks/regret/README.md.
regret:
	$(PYTHON) benchmarks/regret/run.py --page benchmarks/regret/README.md --json benchmarks/regret/results.json

# Does a long run grow in memory, open files or threads? MINUTES, by default 60.
soak:
	$(PYTHON) benchmarks/soak/run.py --minutes $(or $(MINUTES),60)

# docs/cli.md and docs/errors.md, from the code.
references:
	$(PYTHON) docs/site/references.py

# The picture of a report in the README, docs/images/report.png (Chromium).
picture:
	$(PYTHON) docs/site/screenshot.py

# The documents as a site, into build/site/html (extra docs).
docs:
	$(PYTHON) docs/site/build.py
