# Two commands do everything on a fresh machine: `make demo` and `make test`; `make check` is for while you work.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PYTEST := $(BIN)/python -m pytest -n auto --timeout=600

.PHONY: demo test check fast-tests lint types docs docs-serve release clean

demo: $(VENV)/.installed
	$(BIN)/python -m mupscale fit --config configs/quickstart.yaml

# all tests; those marked gpu are skipped where there is no GPU
test: lint types
	$(PYTEST)

# two minutes on two cores: mypy, which uses one core, runs beside the tests
check: $(VENV)/.installed-test
	$(MAKE) --jobs=3 lint types fast-tests

fast-tests: $(VENV)/.installed-test
	$(PYTEST) -m "not slow and not gpu"

lint: $(VENV)/.installed-test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

# mypy does not know that setuptools installs models/, callbacks/ and datamodules/ inside mupscale: it reads these links
types: $(VENV)/.installed-test
	rm -rf build/typed && mkdir -p build/typed/mupscale
	ln -s $(CURDIR)/mupscale/* $(addprefix $(CURDIR)/,models callbacks datamodules) build/typed/mupscale
	$(BIN)/mypy

# the documentation as a site: open build/site/index.html, or `make docs-serve` for one with a search, which needs a
# server, that follows changes
docs: $(VENV)/.installed-docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

docs-serve: $(VENV)/.installed-docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs serve

# wheel and sdist of the last commit in build/dist, tried in empty environments: minutes, most of them for torch
release: $(VENV)/.installed-release
	.ci/release $(BIN)/python

# The demo installs all that any command needs, `make test` the test tools too. pip, not a faster resolver: it honours
# a local CPU build of torch where one is configured
$(VENV)/.installed: pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --editable '.[all]'
	touch $@

$(VENV)/.installed-test: $(VENV)/.installed
	$(BIN)/python -m pip install --quiet --editable '.[test]'
	touch $@

$(VENV)/.installed-docs: $(VENV)/.installed
	$(BIN)/python -m pip install --quiet --editable '.[docs]'
	touch $@

$(VENV)/.installed-release: $(VENV)/.installed
	$(BIN)/python -m pip install --quiet --editable '.[release]'
	touch $@

clean:
	rm -rf $(VENV) build *.egg-info
