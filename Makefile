# The commands of libdevicemesh. They need cargo, cc, c++, make and python3, and fetch everything
# else into target/, except bench-peers, which installs packages of Debian.
CARGO  ?= cargo
PYTHON ?= python3
CXX    ?= c++
# The folder where cargo puts what it builds. CARGO_TARGET_DIR and CARGO_BUILD_TARGET are cargo's
# own variables.
TARGET = $(or $(CARGO_TARGET_DIR),target)
RELEASE = $(TARGET)/$(if $(CARGO_BUILD_TARGET),$(CARGO_BUILD_TARGET)/)release
EXAMPLES = $(TARGET)/examples
LINK = -Iinclude -L$(RELEASE) -ldevicemesh -Wl,-rpath,'$(abspath $(RELEASE))'

# The folders of `make install` are GNU's variables, in capitals. DESTDIR goes before all of them.
PREFIX     ?= /usr/local
LIBDIR     ?= $(PREFIX)/lib
INCLUDEDIR ?= $(PREFIX)/include
BINDIR     ?= $(PREFIX)/bin
DATADIR    ?= $(PREFIX)/share
MANDIR     ?= $(DATADIR)/man

help:
	@echo "make demo      build everything and train the example on eight processes"
	@echo "make demo-hosts  the same training on 4 hosts and on one, side by side"
	@echo "make demo-elastic  a training whose ranks are killed at random, and which comes back"
	@echo "make test      every part once, in some minutes (ARGS='-k name' for some tests)"
	@echo "make test-all  every test"
	@echo "make check     formatting, lints, documentation, drift of the header, imports, columns"
	@echo "make dist      everything that a release consists of, in target/dist"
	@echo "make site      the pages and references as one searchable site, in target/site/html"
	@echo "make install   the library, headers and tool into PREFIX (/usr/local)"
	@echo "CONTRIBUTING.md has the others: benchmarks, sanitizers, fuzzing, bindings, pages."

build: examples
	$(CARGO) build --release --quiet

demo: build
	$(RELEASE)/devicemesh run -n 8 -- $(EXAMPLES)/hsdp_tp --check

# Trains the example on 4 hosts of 2 ranks and on one host, and compares the losses. The hosts are
# network namespaces of this machine, or names on its loopback device.
demo-hosts: build
	$(PYTHON) examples/demo_hosts.py --tool $(RELEASE)/devicemesh --program $(EXAMPLES)/hsdp_tp

# Trains as examples/elastic.cpp does, kills ranks at random, and shows how the job comes back.
# ARGS='--kills 10 --seed 7'.
demo-elastic: build
	$(PYTHON) examples/demo_elastic.py --tool $(RELEASE)/devicemesh --program $(EXAMPLES)/elastic $(ARGS)

# `make test-all` is `make test`, `make test-rest` and `make test-release`.
test:
	$(PYTHON) tests/run.py $(ARGS)
test-all:
	$(PYTHON) tests/run.py --all $(ARGS)
test-rest:
	$(PYTHON) tests/run.py --rest $(ARGS)
test-release:
	$(PYTHON) tests/run.py --release $(ARGS)

# One script serves both, so `make uninstall` removes exactly what `make install` installed.
# Installing builds only what is not built yet, so `make build` and then `sudo make install` builds
# nothing as root.
install: $(RELEASE)/libdevicemesh.so $(RELEASE)/libhostccl.so $(RELEASE)/devicemesh
install uninstall:
	@RELEASE='$(RELEASE)' DESTDIR='$(DESTDIR)' PREFIX='$(PREFIX)' LIBDIR='$(LIBDIR)' INCLUDEDIR='$(INCLUDEDIR)' BINDIR='$(BINDIR)' \
		DATADIR='$(DATADIR)' MANDIR='$(MANDIR)' TOOL='$(RELEASE)/devicemesh' sh packaging/install.sh $@

# Records the C ABI of a release, which later versions must keep (CONTRIBUTING.md). It needs abidw
# (Debian: apt-get install abigail-tools).
abi-record:
	$(PYTHON) tests/compatibility/record.py

# The wheel is for every Python 3. Its tag says the oldest glibc that it runs on.
wheel:
	@mkdir -p target/wheelhouse
	$(PYTHON) bindings/python/build_wheel.py target/wheelhouse

# Everything that a release consists of: sources with all crates, binaries for both machines,
# wheels, Debian packages, the site, a bill of materials and checksums, in target/dist
# (packaging/dist.py --help; ARGS='--machines x86_64 --parts wheels').
dist:
	$(PYTHON) packaging/dist.py $(ARGS)

# Packs the crates for crates.io, and builds each of them from the packed files alone.
crates:
	$(PYTHON) packaging/crates.py $(ARGS)

# Makes a release of a clean tree: version, changelog, ABI record, crates, `make dist`, and the tag
# (packaging/release.py --help). ARGS=--dry-run changes nothing.
release:
	$(PYTHON) packaging/release.py $(VERSION) $(ARGS)

# The handlers of bindings/jax are built against the FFI headers of an old jaxlib, which pip
# fetches.
jax: target/jax/libdevicemesh_jax.so
target/jax/libdevicemesh_jax.so: $(wildcard bindings/jax/src/*) bindings/jax/build_handlers.py include/devicemesh.h
	$(PYTHON) bindings/jax/build_handlers.py $@

# Tests with a recorder in NCCL's place, and with four releases of NVIDIA's own (1.1 GB, fetched
# once).
test-nccl:
	$(PYTHON) tests/nccl_wheels.py --fetch
	$(PYTHON) tests/run.py -k tests/test_nccl

# Fetches real launchers and PyTorch, runs tests/interop and writes the table of docs/interop.md.
# `make test-all` runs these tests too, with what the machine has.
interop:
	$(PYTHON) tests/interop/run.py $(ARGS)

check:
	$(CARGO) fmt --all --check
	$(CARGO) clippy --workspace --all-targets --features cudarc --quiet -- -D warnings
	RUSTDOCFLAGS="-D warnings" $(CARGO) doc --workspace --features cudarc --no-deps --quiet
	$(CARGO) test --package devicemesh-header --quiet
	$(if $(wildcard tests/imports.py),$(PYTHON) tests/imports.py && $(PYTHON) tests/columns.py)

# Measures ours and the peers in turn (benches/peers/bench.py --help names the cases).
bench:
	$(CARGO) build --release --quiet
	$(PYTHON) benches/peers/bench.py $(ARGS)

# The peers are fetched. PyTorch is that of `make interop`, unless DM_BENCH_PYTHON names an
# interpreter that has it.
bench-peers:
	apt-get install -y --no-install-recommends libgloo-dev mpich libmpich-dev openmpi-bin libopenmpi-dev
	cd benches && $(PYTHON) -c 'import sys, common; sys.exit(common.interpreter() is None)'

# Simulates a start of 1,000 and 10,000 ranks on our store and on PyTorch's, in turn.
bench-store:
	$(PYTHON) benches/store_start.py $(ARGS)

# Measures a mesh's calls through the C ABI and PyTorch's, in turn (DM_BENCH_PYTHON names an
# interpreter that has PyTorch).
bench-mesh:
	$(PYTHON) benches/mesh.py $(ARGS)

# Measures what the recording of calls costs beside a build of the library without a recorder
# (docs/recording.md; ARGS=--update-docs writes the table there).
bench-recorder:
	$(PYTHON) benches/recorder.py $(ARGS)

# Counts instructions per call under valgrind and compares them with tests/instructions.json, as
# `make test-rest` does.
instructions:
	$(CARGO) build --release --quiet
	$(PYTHON) tests/instructions.py $(ARGS)

# libFuzzer for SECONDS on one target: FUZZ=frame (the store's frame decoder), FUZZ=records (its
# encrypted connections), FUZZ=mesh_text, FUZZ=decision (the decisions of a recovery) or FUZZ=wire
# (the host engine's network).
# It starts from fuzz/corpus/TARGET.hex, and what widens its search stays in target/fuzz.
# `fuzz/corpus.py add TARGET FILE` keeps an input that the tests replay from then on.
# `make gates ARGS=fuzz` runs every target, one after the other.
SECONDS ?= 60
FUZZ ?= frame
FUZZ_RUN = PATH="$(CURDIR)/target/tools/bin:$$PATH" $(CARGO) fuzz run --target-dir target/fuzz
fuzz: target/tools/bin/cargo-fuzz
	@mkdir -p target/fuzz/corpus-$(FUZZ)
	@$(PYTHON) fuzz/corpus.py unpack $(FUZZ) target/fuzz/seeds-$(FUZZ)
	$(FUZZ_RUN) -s none $(FUZZ) target/fuzz/corpus-$(FUZZ) target/fuzz/seeds-$(FUZZ) -- -max_total_time=$(SECONDS) -max_len=4096

# libFuzzer on sequences of C calls, under AddressSanitizer. RUSTC_BOOTSTRAP=1 lets the stable
# compiler take -Zsanitizer, which is for nightly compilers, for this build alone.
fuzz-abi: target/tools/bin/cargo-fuzz
	@mkdir -p target/fuzz/corpus-abi
	@$(PYTHON) fuzz/corpus.py unpack abi target/fuzz/seeds-abi
	RUSTC_BOOTSTRAP=1 $(FUZZ_RUN) -s address abi target/fuzz/corpus-abi target/fuzz/seeds-abi -- -max_total_time=$(SECONDS) -max_len=1024 -len_control=0

target/tools/bin/cargo-fuzz:
	$(CARGO) install --quiet --root target/tools --version 0.13.2 cargo-fuzz

# Sanitizers, valgrind, models of weak memory, coverage and fuzzing (tests/gates/run.py --help).
gates:
	$(PYTHON) tests/gates/run.py --seconds $(SECONDS) $(ARGS)

# What Cargo.lock holds: deny.toml says what may be there, and cargo-machete finds what no source
# uses. The two tools are those on the PATH, or are built once in target/tools, unoptimised, which
# takes some minutes. Advisories come from GitHub; DENY='licenses bans sources' needs no GitHub.
DENY ?= advisories licenses bans sources
DENY_TOOL = $(or $(shell command -v cargo-deny),target/tools/bin/cargo-deny)
MACHETE = $(or $(shell command -v cargo-machete),target/tools/bin/cargo-machete)
TOOL_INSTALL = CARGO_PROFILE_DEV_DEBUG=0 $(CARGO) install --quiet --debug --locked --root target/tools
deny: $(DENY_TOOL) $(MACHETE)
	$(DENY_TOOL) --locked check $(DENY)
	$(MACHETE) --skip-target-dir

target/tools/bin/cargo-deny:
	$(TOOL_INSTALL) --version 0.18.3 --no-default-features cargo-deny

target/tools/bin/cargo-machete:
	$(TOOL_INSTALL) --version 0.9.2 cargo-machete

bare-root:
	$(PYTHON) tests/bare_root.py $(ARGS)

# Installs what `make dist` has made in a bare Debian without a network, by each road (root).
bare-dist:
	$(PYTHON) tests/bare_dist.py $(ARGS)

RUNS ?= 600
soak:
	$(CARGO) build --release --quiet
	$(PYTHON) tests/soak.py --runs $(RUNS) $(if $(SEED),--seed $(SEED)) --report

# Faults of jobs on four hosts: ranks that end, hosts that fall silent, networks that are parted.
HOST_RUNS ?= 500
soak-hosts:
	$(CARGO) build --release --quiet
	$(PYTHON) tests/soak.py --hosts --runs $(HOST_RUNS) $(if $(SEED),--seed $(SEED))

# Jobs of examples/elastic.cpp whose ranks are killed and stopped at random moments.
# ARGS=--hosts: on four hosts, of which some fall silent.
ELASTIC_RUNS ?= 500
soak-elastic: build
	$(PYTHON) tests/soak_elastic.py --program $(EXAMPLES)/elastic --runs $(ELASTIC_RUNS) $(if $(SEED),--seed $(SEED)) $(ARGS)

pictures:
	$(CARGO) build --release --quiet
	$(PYTHON) tests/mesh_page.py

# docs/pictures/trace.svg: some steps of a training, as `devicemesh trace` has them.
trace-picture: $(EXAMPLES)/hsdp_tp
	$(PYTHON) tests/trace_picture.py $(EXAMPLES)/hsdp_tp

# The Rust documentation, and the C and C++ reference by doxygen, which is fetched once, pinned
# (docs/reference/build.py). Warnings are errors in both.
docs:
	RUSTDOCFLAGS="-D warnings" $(CARGO) doc --workspace --features cudarc --no-deps --quiet
	@echo $(CURDIR)/target/doc/devicemesh/index.html
	@$(PYTHON) docs/reference/build.py

# Makes one searchable site of the pages and the references of all languages, in target/site/html.
# The first build fetches Sphinx and doxygen, pinned. Later builds need no network. A warning is an
# error.
site:
	@$(PYTHON) docs/site/build.py $(ARGS)

header:
	UPDATE_HEADER=1 $(CARGO) test --package devicemesh-header --quiet

examples: $(EXAMPLES)/hsdp_tp $(EXAMPLES)/hsdp_tp_cuda $(EXAMPLES)/shards $(EXAMPLES)/hello_mesh $(EXAMPLES)/pipeline $(EXAMPLES)/survive $(EXAMPLES)/recover $(EXAMPLES)/elastic

# make only decides whether to call cargo, and cargo decides what to build. No rule touches cargo's
# files, because cargo goes by their times.
# Tests are not in the lists, because cargo does not make the files anew for them: `make install`
# would then call cargo each time.
SOURCES = $(shell find $(1) -name '*.rs' ! -name tests.rs ! -name '*_tests.rs' ! -path '*/tests/*')
ENGINE = $(call SOURCES,hostccl/src hostccl/reduce/src recording/src) Cargo.toml Cargo.lock \
	$(wildcard hostccl/Cargo.toml hostccl/*/Cargo.toml recording/Cargo.toml)
CORE = $(ENGINE) $(call SOURCES,src) build.rs
$(RELEASE)/libdevicemesh.so: $(CORE)
$(RELEASE)/libhostccl.so: $(ENGINE) hostccl/capi/build.rs $(call SOURCES,hostccl/capi/src)
$(RELEASE)/devicemesh: $(CORE) $(call SOURCES,tool/src) $(shell find tool/templates -type f) tool/Cargo.toml
$(RELEASE)/libdevicemesh.so $(RELEASE)/libhostccl.so $(RELEASE)/devicemesh:
	$(CARGO) build --release

# From GCC 14 on a function without a declaration is an error, so it is one with every compiler.
C_EXAMPLE = -std=c11 -O2 -Wall -Wextra -Werror=implicit-function-declaration

# The programs of docs/guide.
GUIDE = $(basename $(notdir $(wildcard examples/guide/*.c examples/guide/*.cpp)))
guide: $(addprefix $(EXAMPLES)/guide/,$(GUIDE))
$(EXAMPLES)/guide/%: LINK += -Wl,-rpath,'$$ORIGIN/../../release'
$(EXAMPLES)/guide/%: examples/guide/%.cpp $(wildcard include/*.h*) $(RELEASE)/libdevicemesh.so
	@mkdir -p $(@D)
	$(CXX) -std=c++17 -O2 -Wall -Wextra $< $(LINK) -pthread -o $@
$(EXAMPLES)/guide/%: examples/guide/%.c $(wildcard include/*.h) $(RELEASE)/libdevicemesh.so
	@mkdir -p $(@D)
	$(CC) $(C_EXAMPLE) $< $(LINK) -o $@

# The example for a GPU. Building it needs nothing of CUDA (examples/device_cuda.h).
$(EXAMPLES)/hsdp_tp_cuda: examples/hsdp_tp.cpp $(wildcard examples/*.h include/*.h) $(RELEASE)/libdevicemesh.so
	@mkdir -p $(EXAMPLES)
	$(CXX) -std=c++17 -O3 -Wall -Wextra -DDM_EXAMPLE_CUDA -DDM_EXAMPLE_DATA='"$(CURDIR)/examples/data/digits.csv"' $< $(LINK) -ldl -o $@

$(EXAMPLES)/%: examples/%.cpp $(wildcard examples/*.h include/*.h) $(RELEASE)/libdevicemesh.so
	@mkdir -p $(EXAMPLES)
	$(CXX) -std=c++17 -O3 -Wall -Wextra -DDM_EXAMPLE_DATA='"$(CURDIR)/examples/data/digits.csv"' $< $(LINK) -o $@

$(EXAMPLES)/%: examples/%.c $(wildcard include/*.h) $(RELEASE)/libdevicemesh.so
	@mkdir -p $(EXAMPLES)
	$(CC) $(C_EXAMPLE) $< $(LINK) -o $@

clean:
	$(CARGO) clean

.PHONY: help build docs site guide demo demo-hosts demo-elastic soak-elastic test test-all test-rest test-release test-nccl soak soak-hosts \
	jax interop check header examples fuzz clean bench-store bench-mesh bench-recorder instructions pictures trace-picture fuzz-abi wheel bench bench-peers \
	install uninstall abi-record gates deny bare-root bare-dist dist crates release
