//! Tests of libhostccl.so and hostccl.h as C programs use them: the exports, the SONAME, the header
//! alone and beside other headers, and a program that is linked and run.

#[path = "../../tests/cargo_build/mod.rs"]
mod cargo_build;

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::OnceLock;

use cargo_build::shared_engine;

const C: [&str; 4] = ["cc", "-std=c11", "-x", "c"];
const CXX: [&str; 4] = ["c++", "-std=c++17", "-x", "c++"];
const STRICT: [&str; 4] = ["-Wall", "-Wextra", "-Wpedantic", "-Werror"];

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap().to_owned()
}

/// Returns the shared library of this profile. It is built here, because tests do not depend on the
/// crate that makes it.
fn library() -> &'static Path {
    static LIBRARY: OnceLock<PathBuf> = OnceLock::new();
    LIBRARY.get_or_init(shared_engine)
}

fn soname() -> String {
    let (major, minor) = (env!("CARGO_PKG_VERSION_MAJOR"), env!("CARGO_PKG_VERSION_MINOR"));
    let version = if major == "0" { format!("{major}.{minor}") } else { major.to_owned() };
    format!("libhostccl.so.{version}")
}

/// Runs a program that must succeed, and returns its output.
#[track_caller]
fn run(command: &mut Command) -> String {
    let output = command.stdin(Stdio::null()).output().unwrap_or_else(|error| panic!("{command:?}: {error}"));
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    assert!(output.status.success(), "{command:?}: {}\n{}", output.status, text(&output.stderr));
    text(&output.stdout)
}

/// Returns an empty folder for one test, in the build folder.
fn scratch(name: &str) -> PathBuf {
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("c_library-{name}"));
    let _ = fs::remove_dir_all(&folder);
    fs::create_dir_all(&folder).unwrap();
    folder
}

/// Returns the functions that the header declares: the names before a parenthesis, outside of
/// comments and macros.
fn declared() -> BTreeSet<String> {
    let header = fs::read_to_string(root().join("include/hostccl.h")).unwrap();
    let mut code = String::new();
    for (i, piece) in header.split("/*").enumerate() {
        code += if i == 0 { piece } else { piece.split_once("*/").unwrap().1 };
    }
    let code: Vec<&str> = code.lines().filter(|line| !line.trim_start().starts_with('#')).collect();
    let code = code.join("\n");
    let names = code
        .match_indices('(')
        .map(|(at, _)| code[..at].rsplit(|c: char| !c.is_alphanumeric() && c != '_').next().unwrap().to_owned());
    names.filter(|name| name.starts_with("nccl") || name.starts_with("hostccl")).collect()
}

#[test]
fn exports_are_exactly_the_headers_functions() {
    let symbols = run(Command::new("nm").args(["-D", "--defined-only"]).arg(library()));
    let exported: BTreeSet<String> = symbols.lines().map(|line| line.split(' ').next_back().unwrap().into()).collect();
    assert_eq!(exported, declared());
    let engine: BTreeSet<String> = hostccl::SYMBOLS.iter().map(|&name| name.into()).collect();
    assert_eq!(exported, engine);
}

#[test]
fn the_soname_has_major_and_minor_before_1_0() {
    let dynamic = run(Command::new("readelf").arg("-d").arg(library()));
    assert!(dynamic.contains(&format!("[{}]", soname())), "{dynamic}");
}

/// Compiles a source text as C and as C++, without linking it.
#[track_caller]
fn compile(name: &str, source: &str) {
    let folder = scratch(name);
    fs::write(folder.join("source"), source).unwrap();
    // This file takes the place of NVIDIA's header, which is not needed to build the engine.
    let nvidia = "#ifndef NCCL_H_\n#define NCCL_H_\ntypedef struct CUstream_st *cudaStream_t;\n\
        typedef struct ncclComm *ncclComm_t;\ntypedef struct { char internal[128]; } ncclUniqueId;\n\
        typedef enum { ncclSuccess = 0, ncclNumResults = 9 } ncclResult_t;\n\
        typedef enum { ncclInt8 = 0 } ncclDataType_t;\ntypedef enum { ncclSum = 0 } ncclRedOp_t;\n#endif\n";
    fs::write(folder.join("nccl.h"), nvidia).unwrap();
    for compiler in [C, CXX] {
        let mut command = Command::new(compiler[0]);
        command.args(&compiler[1..]).args(STRICT).arg("-fsyntax-only");
        run(command.arg("-I").arg(root().join("include")).arg("-I").arg(&folder).arg(folder.join("source")));
    }
}

#[test]
fn the_header_compiles_alone_and_twice() {
    compile("alone", "#include <hostccl.h>\n");
    compile("twice", "#include <hostccl.h>\n#include <hostccl.h>\nncclConfig_t config = NCCL_CONFIG_INITIALIZER;\n");
}

#[test]
fn the_header_agrees_with_cuda_and_with_devicemesh_about_their_types() {
    let types = "typedef struct CUstream_st *cudaStream_t;\ntypedef struct ncclComm *ncclComm_t;\n";
    compile("types-before", &format!("{types}#include <hostccl.h>\n"));
    compile("types-after", &format!("#include <hostccl.h>\n{types}"));
    if root().join("include/devicemesh.h").exists() {
        compile("devicemesh-before", "#include <devicemesh.h>\n#include <hostccl.h>\n");
        compile("devicemesh-after", "#include <hostccl.h>\n#include <devicemesh.h>\n");
    }
}

#[test]
fn the_header_leaves_a_real_nccl_h_alone() {
    let extension = "int lost(ncclComm_t comm, int *rank);\n\
        int lost(ncclComm_t comm, int *rank) { return hostcclCommLostRank(comm, rank) != ncclSuccess; }\n";
    compile("nccl-before", &format!("#include <nccl.h>\n#include <hostccl.h>\n{extension}"));
    compile("nccl-after", &format!("#include <hostccl.h>\n#include <nccl.h>\n{extension}"));
}

/// Compiles and links a program of the folder tests/c as C and as C++, and runs it with each of
/// these lists of arguments.
#[track_caller]
fn link_and_run(name: &str, runs: &[[&str; 2]]) {
    let folder = scratch(name);
    // An installed library has two names: its SONAME, and the name for which the linker looks.
    std::os::unix::fs::symlink(library(), folder.join("libhostccl.so")).unwrap();
    std::os::unix::fs::symlink(library(), folder.join(soname())).unwrap();
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/c").join(name).with_extension("c");
    for (language, compiler) in [("c", C), ("c++", CXX)] {
        let program = folder.join(format!("{name}-{language}"));
        let mut command = Command::new(compiler[0]);
        command.args(&compiler[1..]).args(STRICT).arg("-I").arg(root().join("include")).arg(&source);
        command.args(["-x", "none", "-lhostccl", "-L"]).arg(&folder).arg(format!("-Wl,-rpath,{}", folder.display()));
        run(command.arg("-o").arg(&program));
        for arguments in runs {
            run(Command::new(&program).args(arguments));
        }
    }
}

#[test]
fn a_program_written_against_nccl_links_and_runs() {
    link_and_run("link_nccl", &[["4", "inherit"], ["3", "pipe"], ["1", "pipe"]]);
}

#[test]
fn a_program_whose_communicator_grows_and_is_revoked_links_and_runs() {
    link_and_run("renew", &[["1", "1"], ["3", "2"]]);
}
