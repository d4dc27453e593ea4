# Every target installs or fetches what it lacks, says so, and does nothing twice. What is
# downloaded lies in one folder: $NIXLKV_CACHE, by default nixlkv in the user's cache.

SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help

# go-nvml declares what NVIDIA has deprecated, and would say so page after page.
export CGO_CFLAGS ?= -O2 -g -Wno-deprecated-declarations

ENGINE ?= auto
ARGS ?=
DURATION ?= 10m
ROOMS ?=
BENCHFLAGS ?=
FUZZTIME ?=
# Tests run each time: what the interop tests depend on is not all known to Go's cache.
TESTFLAGS ?= -count=1 -timeout 40m

.PHONY: help
help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-12s %s\n", $$1, $$2 }' Makefile

.PHONY: demo
demo: ## move KV cache between two workers; ENGINE=auto|native|embedded, ARGS=flags
	@scripts/program ./examples/demo '$(ENGINE)' $(ARGS)

.PHONY: test
test: ## lint, all tests with the race detector and without cgo, fuzzing (long if CI=true)
	@scripts/deps
	@scripts/fetch-nixl
	@scripts/fetch-peers
	@scripts/lint
	@scripts/with-env scripts/gotest .build/test.json -race -vet=off $(TESTFLAGS) ./...
	@packages=$$(scripts/nocgo-packages); \
	CGO_ENABLED=0 scripts/with-env scripts/gotest .build/test-nocgo.json -vet=off $(TESTFLAGS) $$packages
	@scripts/check-skips .build/test.json .build/test-nocgo.json
	@if [[ $${CI:-} == true ]]; then scripts/fuzz; else scripts/fuzz 2s; fi

.PHONY: lint
lint: ## gofmt, go.mod, go vet and staticcheck
	@scripts/deps build
	@scripts/lint

.PHONY: bench
bench: ## benchmarks, also into .build/bench.txt; BENCHFLAGS=flags of go test
	@scripts/deps build
	@[[ -n $${NIXLKV_NIXL_LIB:-} ]] || scripts/fetch-nixl
	@scripts/bench $(BENCHFLAGS)

.PHONY: soak
soak: ## rooms through 64 decodes, some killed, for DURATION=10m or ROOMS=n of them, and a table; ENGINE, ARGS as above
	@scripts/program ./internal/soak '$(ENGINE)' $(if $(ROOMS),-rooms '$(ROOMS)',-duration '$(DURATION)') $(ARGS)

.PHONY: fuzz
fuzz: ## every fuzz target, five minutes in all, or FUZZTIME=10m each
	@scripts/deps build
	@scripts/fuzz $(FUZZTIME)

.PHONY: test-gpu
test-gpu: ## the tests that need a GPU; says so where there is none
	@scripts/deps build
	@scripts/test-gpu

.PHONY: kvpeer
kvpeer: ## the driver program of the interop tests, bin/kvpeer
	@[[ -d examples/kvpeer ]] || { echo 'kvpeer: there is no examples/kvpeer here' >&2; exit 1; }
	@scripts/deps build
	go build -o bin/kvpeer ./examples/kvpeer

.PHONY: deps
deps: ## install the Debian packages that are missing
	@scripts/deps

.PHONY: clean
clean: ## remove what was built
	rm -rf bin .build

.PHONY: clean-cache
clean-cache: ## remove what was fetched
	@scripts/clean-cache
