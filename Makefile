# What CI runs, by name. `make check` is everything.
PYTHON ?= python
TYPES := build/types

.PHONY: check lint types test slow zoo

check: lint types test

lint:
	ruff check .
	ruff format --check .

# mypy reads folders as they import, so the rooms are linked together as the package.
types:
	rm -rf $(TYPES) && mkdir -p $(TYPES)/autoparallel
	ln -s $(addprefix $(CURDIR)/,$(wildcard api/*.py) api/py.typed api/commands api/report) \
	    $(addprefix $(CURDIR)/,cost_model planner passes runtime) $(TYPES)/autoparallel/
	MYPYPATH=$(TYPES) mypy -p autoparallel

test:
	$(PYTHON) -m pytest -n 2

slow:
	$(PYTHON) -m pytest -m slow

# Every architecture of tests/zoo, verified; writes docs/zoo.md.
zoo:
	$(PYTHON) benchmarks/zoo/run.py
