# Each target needs only Python 3.9 to 3.12, and makes its own virtual environment.
PYTHON ?= python3
VENV ?= .venv
MINDSPORE ?= mindspore

# With AVX-512, MindSpore chooses convolutions on CPU that are 10 to 80 times slower.
export ONEDNN_MAX_CPU_ISA ?= AVX2

.PHONY: lenet lenet-2 gan gan-2 gan-policies compare advise bench scaling device dry-gpu dry-ascend pictures toolkits test test-slow oldest test-oldest test-all lint docs dist

lenet: $(VENV)/examples
	$(VENV)/bin/python examples/lenet/train.py

gan: $(VENV)/examples
	@echo "Trains a DCGAN: 5 to 7 minutes on 2 CPU cores. The bar shows the time that is left."
	$(VENV)/bin/python examples/gan/train.py

# The same examples on two ranks.
lenet-2 gan-2: %-2: $(VENV)/examples
	PATH="$(abspath $(VENV)/bin):$$PATH" msrun --worker_num=2 --local_worker_num=2 --join=True \
		--log_dir=output/$*/ranks examples/$*/train.py

# 18 runs with a quarter of the epochs of `make gan`. After an interruption, the same command continues.
gan-policies: $(VENV)/examples
	@echo "Trains 18 GANs: about 25 minutes on 2 CPU cores."
	$(VENV)/bin/python examples/gan/policies.py

compare: $(VENV)/examples
	@echo "Trains LeNet-5 15 times: about 3 minutes on 2 CPU cores. The bar shows the time that is left."
	$(VENV)/bin/python examples/lenet/compare.py

advise: $(VENV)/examples
	@echo "Trains a transformer and a ResNet three times each: about 2 minutes on 2 CPU cores."
	$(VENV)/bin/python examples/diagnosis/advise.py

bench: $(VENV)/examples
	$(VENV)/bin/python benchmarks/bench.py

scaling: $(VENV)/examples
	$(VENV)/bin/python benchmarks/data_parallel.py

# Self-check, quick tests and benchmark on this machine's device, with the environment of `$(PYTHON)`, in which nothing is
# installed: `make device DEVICE=GPU PYTHON=...`. It needs the packages of the extras `test` and `examples`.
device:
	$(PYTHON) benchmarks/device.py $(if $(DEVICE),--device $(DEVICE))

# MindSpore's GPU backend without a GPU: the kernels of a step. It needs gcc and g++. `make dry-gpu OUTPUT=FILE` also adds
# the tables to a file, each below its command.
dry-gpu: $(VENV)/examples
	$(VENV)/bin/python tools/dry_gpu/count.py $(if $(OUTPUT),--output $(OUTPUT))
	$(VENV)/bin/python tools/dry_gpu/count.py resnet50_small --settings $(if $(OUTPUT),--output $(OUTPUT))

# MindSpore's Ascend backend without CANN or a chip, likewise: the self-check in both overflow modes, and the cells.
dry-ascend: $(VENV)/examples
	$(VENV)/bin/python tools/dry_ascend/selfcheck.py $(if $(OUTPUT),--output $(OUTPUT))
	$(VENV)/bin/python tools/dry_ascend/count.py $(if $(OUTPUT),--output $(OUTPUT))

# Runs the examples, and makes docs/pictures from their results.
pictures: $(VENV)/examples
	$(VENV)/bin/python examples/pictures.py

# Trains with MindSpore's toolkits, unmodified, in a separate environment.
toolkits: .venv-toolkits/installed
	@echo "Trains with mindcv, mindyolo and mindone: 7 to 15 minutes on 2 CPU cores."
	.venv-toolkits/bin/python examples/toolkits/mindcv_classifier.py
	.venv-toolkits/bin/python examples/diagnosis/advise.py --networks mindcv-resnet18
	.venv-toolkits/bin/python examples/toolkits/mindyolo_detector.py
	.venv-toolkits/bin/python examples/toolkits/mindone_autoencoder.py
	PATH="$(abspath .venv-toolkits/bin):$$PATH" msrun --worker_num=2 --local_worker_num=2 --join=True \
		--log_dir=output/toolkits/zero/ranks examples/toolkits/mindone_zero.py

QUICK = not slow and not nightly

test: $(VENV)/installed
	$(VENV)/bin/python -m pytest -m "$(QUICK)"

test-slow: $(VENV)/installed
	$(VENV)/bin/python -m pytest -m "slow and not nightly"

# What depends on MindSpore's version: configurations, what a forward writes, checkpoints, loading, warnings and its facts,
# and a job of ranks. Some 200 tests, which also run with the oldest one.
OLDEST = $(wildcard tests/cells/test_configurations*.py tests/cells/test_checkpoints*.py tests/cells/test_dropped*.py \
	tests/cells/test_load*.py tests/cells/test_resume*.py tests/forward_state tests/mindspore)
JOB_OF_RANKS = tests/ranks/test_data_parallel.py

oldest:
	$(MAKE) --no-print-directory .venv-oldest/installed VENV=.venv-oldest MINDSPORE=mindspore==2.7.0

test-oldest: oldest
	.venv-oldest/bin/python -m pytest -m "not nightly" $(OLDEST)
	.venv-oldest/bin/python -m pytest -m "$(QUICK)" $(JOB_OF_RANKS)

# All tests with the newest MindSpore, and with the oldest all that do not repeat others at full size. The latter's
# processes keep all that they compile, so that each folder has its own. With FAIL_IF_DROPPED, see tests/conftest.py.
test-all: export FAIL_IF_DROPPED = 1
test-all: test test-slow oldest
	$(VENV)/bin/python -m pytest -m nightly
	set -e; for folder in $(sort $(dir $(wildcard tests/*/test_*.py))); do \
		.venv-oldest/bin/python -m pytest -m "not nightly" $$folder; done

lint: $(VENV)/installed
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy

# Builds and checks what is published: the wheel, installed into an empty environment, must pass its self-check.
dist:
	rm -rf dist build .venv-wheel
	$(PYTHON) -m venv .venv-wheel
	.venv-wheel/bin/python -m pip install --quiet build twine
	.venv-wheel/bin/python -m build --outdir dist .
	.venv-wheel/bin/python -m twine check --strict dist/*
	rm -rf .venv-wheel
	$(PYTHON) -m venv .venv-wheel
	.venv-wheel/bin/python -m pip install --quiet "$(MINDSPORE)" dist/*.whl
	cd dist && ../.venv-wheel/bin/python -m ms_lossscale.selfcheck

.venv-toolkits/installed: setup.cfg pyproject.toml
	$(call install,.venv-toolkits,examples$(comma)toolkits)
	touch $@

# The site, whose Chinese half has a search of its own. Fails on any warning. To read the pages, open site/index.html; for
# the search, run `.venv-docs/bin/python -m http.server --directory site`.
docs: .venv-docs/installed
	NO_MKDOCS_2_WARNING=1 .venv-docs/bin/mkdocs build
	NO_MKDOCS_2_WARNING=1 .venv-docs/bin/mkdocs build --config-file mkdocs.zh.yml

# Installs only the extra: docstrings can be read without the package and MindSpore.
.venv-docs/installed: setup.cfg
	$(PYTHON) -m venv .venv-docs
	$(PYTHON) -c "from configparser import *; settings = RawConfigParser(); settings.read('setup.cfg'); \
		print(settings['options.extras_require']['docs'])" > .venv-docs/requirements.txt
	.venv-docs/bin/python -m pip install --quiet --requirement .venv-docs/requirements.txt
	touch $@

comma := ,

# Makes a virtual environment with MindSpore, the package and some of its extras.
define install
@echo "Installing MindSpore and all that this needs into $(1): 2 minutes or more, and hundreds of megabytes the first time."
$(PYTHON) -m venv $(1)
$(1)/bin/python -m pip install "$(MINDSPORE)" --editable ".[$(2)]"
endef

# The environment of the examples and the benchmarks.
$(VENV)/examples: setup.cfg pyproject.toml
	$(call install,$(VENV),examples)
	touch $@

# The environment of the tests, which need more.
$(VENV)/installed: setup.cfg pyproject.toml
	$(call install,$(VENV),examples$(comma)test)
	touch $(VENV)/examples $@
