# `make lenet`, `gan` and `test` need nothing but Python 3.9 to 3.12: they make the virtual environment themselves.
PYTHON ?= python3
VENV ?= .venv
MINDSPORE ?= mindspore

# With AVX-512, MindSpore's convolutions on CPU choose a reference kernel that is 10 to 80 times slower.
export ONEDNN_MAX_CPU_ISA ?= AVX2

.PHONY: lenet gan compare test lint

lenet: $(VENV)/installed
	$(VENV)/bin/python examples/lenet/train.py

gan: $(VENV)/installed
	$(VENV)/bin/python examples/gan/train.py

compare: $(VENV)/installed
	$(VENV)/bin/python examples/lenet/compare.py

test: $(VENV)/installed
	$(VENV)/bin/python -m pytest

lint: $(VENV)/installed
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .

$(VENV)/installed: setup.cfg pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(VENV)/bin/python -m pip install --quiet "$(MINDSPORE)" --editable ".[examples,test]"
	touch $@
