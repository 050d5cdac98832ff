//! `devicemesh info`, with the real binary.

use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

use devicemesh::rendezvous::store::Server;

/// Runs the tool with these variables alone, and returns its lines, split after the first word.
fn info(arguments: &[&str], variables: &[(&str, &str)]) -> Vec<(String, String)> {
    let mut command = Command::new(env!("CARGO_BIN_EXE_devicemesh"));
    let output = command.arg("info").args(arguments).env_clear().envs(variables.iter().copied()).output().unwrap();
    assert!(output.status.success(), "{output:?}");
    let text = String::from_utf8(output.stdout).unwrap();
    let split = |line: &str| line.split_once(' ').map(|(what, said)| (what.to_owned(), said.trim().to_owned()));
    text.lines().filter_map(split).collect()
}

/// Runs the tool with these variables alone, and returns its JSON.
fn json(arguments: &[&str], variables: &[(&str, &str)]) -> serde_json::Value {
    let mut command = Command::new(env!("CARGO_BIN_EXE_devicemesh"));
    command.args(["info", "--json"]).args(arguments).env_clear().envs(variables.iter().copied());
    serde_json::from_slice(&command.output().unwrap().stdout).unwrap()
}

fn said<'a>(lines: &'a [(String, String)], what: &str) -> &'a str {
    &lines.iter().find(|(known, _)| known == what).unwrap_or_else(|| panic!("{what} is not in {lines:?}")).1
}

#[test]
fn versions_libraries_and_the_launcher_are_told() {
    let torch =
        [("RANK", "2"), ("WORLD_SIZE", "4"), ("LOCAL_RANK", "1"), ("MASTER_ADDR", "head"), ("MASTER_PORT", "29500")];
    let lines = info(&[], &torch);
    assert_eq!(said(&lines, "devicemesh"), env!("CARGO_PKG_VERSION"));
    assert!(said(&lines, "cpu").contains("host engine"), "{lines:?}");
    assert!(!said(&lines, "devices").is_empty());
    assert_eq!(said(&lines, "launcher"), "the environment: rank 2 of 4, local rank 1, meeting at head:29500");
    assert_eq!(said(&info(&[], &[]), "launcher"), "alone: rank 0 of 1, local rank 0");
}

#[test]
fn what_is_missing_or_wrong_is_said_and_is_no_failure() {
    let lines = info(&["--library", "/no/such/libnccl.so.2"], &[("RANK", "4"), ("WORLD_SIZE", "4")]);
    assert!(
        said(&lines, "cuda").starts_with("none: ") && said(&lines, "cuda").contains("/no/such/libnccl.so.2"),
        "{lines:?}"
    );
    assert!(said(&lines, "launcher").contains("RANK"), "{lines:?}");
}

#[test]
fn the_launchers_variables_are_listed_without_secrets() {
    let variables =
        [("PMI_RANK", "1"), ("PMI_SIZE", "2"), ("PMI_LOCAL_RANK", "1"), ("DM_STORE_SECRET", "hush"), ("HOME", "/")];
    let lines = info(&[], &variables);
    let said = said(&lines, "variables");
    assert!(said.contains("PMI_RANK=1") && said.contains("PMI_SIZE=2"), "{said}");
    assert!(
        said.contains("DM_STORE_SECRET=(set, not shown)") && !said.contains("hush") && !said.contains("HOME"),
        "{said}"
    );
    assert_eq!(self::said(&info(&[], &[]), "variables"), "none");
}

#[test]
fn the_store_is_tried() {
    let server = Server::bind(("127.0.0.1", 0)).unwrap();
    let port = server.local_addr().port().to_string();
    let launched = [("RANK", "1"), ("WORLD_SIZE", "2"), ("MASTER_ADDR", "127.0.0.1"), ("MASTER_PORT", &port)];
    let name = format!("tcp://127.0.0.1:{port}");
    for lines in [info(&[], &launched), info(&["--store", &name], &[])] {
        let said = said(&lines, "store");
        assert!(said.starts_with(&format!("{name}, served by libdevicemesh, reached in ")), "{said}");
    }
    assert!(said(&info(&[], &[("DM_STORE_SECRET", "")]), "store").contains("DM_STORE_SECRET is set but empty"));
    drop(server);
    let began = Instant::now();
    let lines = info(&[], &launched);
    assert!(said(&lines, "store").starts_with(&format!("not reached: no store at {name} within 2000 ms")), "{lines:?}");
    assert!(began.elapsed() < Duration::from_secs(20), "{:?}", began.elapsed());
    let folder = format!("file://{}/not/there", env!("CARGO_TARGET_TMPDIR"));
    let made = format!("/not is not there yet; the ranks can make it in {}", env!("CARGO_TARGET_TMPDIR"));
    assert!(said(&info(&["--store", &folder], &[]), "store").ends_with(&made));
    assert!(json(&["--store", &folder], &[])["store"]["missing"].as_str().unwrap().ends_with(&made));
    let folder = format!("file://{}/there", env!("CARGO_TARGET_TMPDIR"));
    assert!(said(&info(&["--store", &folder], &[]), "store").ends_with("which can be written"));
    assert!(!Path::new(env!("CARGO_TARGET_TMPDIR")).join("not").exists(), "nothing is made");
    assert!(
        said(&info(&["--store", "file:///proc/1/x"], &[]), "store").starts_with("not reached: "),
        "no folder to write in"
    );
}

#[test]
fn json_says_the_same() {
    let json = json(&[], &[("RANK", "0"), ("WORLD_SIZE", "1")]);
    assert_eq!(json["devicemesh"], env!("CARGO_PKG_VERSION"));
    assert_eq!(json["launcher"]["found"], "the environment: rank 0 of 1, local rank 0");
    assert_eq!(json["variables"][0], serde_json::json!(["RANK", "0"]));
    assert_eq!((&json["rank"], &json["world_size"]), (&0.into(), &1.into()));
    assert!(json["store"]["unneeded"].is_string(), "{json}");
}

#[test]
fn the_wire_is_that_of_the_environment() {
    let wire = |variables: &[(&str, &str)]| said(&info(&[], variables), "wire").to_owned();
    assert_eq!(wire(&[("DM_SOCKET_IFNAME", "lo")]), "TCP at 127.0.0.1 (lo)");
    assert!(wire(&[]).starts_with("TCP at "), "{}", wire(&[]));
    let refused = wire(&[("DM_WIRE", "pigeon")]);
    assert!(refused.starts_with("none: DM_WIRE is \"pigeon\""), "{refused}");
    let refused = wire(&[("DM_SOCKET_IFNAME", "no_such")]);
    assert!(refused.starts_with("none: DM_SOCKET_IFNAME is \"no_such\", and fits no interface"), "{refused}");
    // The wire is where the store is reached.
    let server = Server::bind(("127.0.0.1", 0)).unwrap();
    let port = server.local_addr().port().to_string();
    let launched = [("RANK", "1"), ("WORLD_SIZE", "2"), ("MASTER_ADDR", "127.0.0.1"), ("MASTER_PORT", &port)];
    assert_eq!(wire(&launched), "TCP at 127.0.0.1 (lo)");
}

#[test]
fn a_wire_that_would_be_refused_is_not_there() {
    let wire = |variables: &[(&str, &str)]| said(&info(&[], variables), "wire").to_owned();
    let ucx = [("DM_WIRE", "ucx"), ("DM_SOCKET_IFNAME", "lo")];
    let refused = wire(&[ucx[0], ("DM_UCX_LIBRARY", "/no/such/libucp.so.0")]);
    assert!(refused.starts_with("none: DM_WIRE=ucx needs UCX, which does not load: /no/such/libucp.so.0"), "{refused}");
    let refused = wire(&[ucx[0], ("DM_STORE_SECRET", "hush")]);
    assert!(refused.starts_with("none: DM_WIRE is \"ucx\" and a secret is set"), "{refused}");
    let here = wire(&ucx);
    let there = here.starts_with("UCX 1.") && here.ends_with(", meeting at 127.0.0.1 (lo)");
    assert!(there || here.starts_with("none: DM_WIRE=ucx needs UCX"), "{here}");
}

/// The names of the project's variables that a source file reads. Such a name is a string of its
/// own; those of the header's constants and of statuses are not variables.
fn variables_in(source: &str, header: &str) -> Vec<String> {
    let names = source.split('"').filter(|text| text.starts_with("DM_"));
    let is_name = |text: &&str| text.bytes().all(|byte| byte.is_ascii_uppercase() || byte == b'_');
    let is_constant = |text: &str| text.starts_with("DM_STATUS_") || header.contains(&format!("#define {text} "));
    names.filter(is_name).filter(|text| !is_constant(text)).map(str::to_owned).collect()
}

fn sources(folder: &Path, found: &mut Vec<String>, header: &str) {
    for entry in std::fs::read_dir(folder).unwrap().map(Result::unwrap) {
        let (path, name) = (entry.path(), entry.file_name().into_string().unwrap());
        if path.is_dir() && name != "tests" {
            sources(&path, found, header);
        } else if name.ends_with(".rs") && name != "tests.rs" {
            let source = std::fs::read_to_string(&path).unwrap();
            let source = source.split("#[cfg(test)]\nmod tests {").next().unwrap();
            found.extend(variables_in(source, header));
        }
    }
}

#[test]
fn every_variable_that_the_sources_read_is_listed() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap();
    let header = std::fs::read_to_string(root.join("include/devicemesh.h")).unwrap();
    let mut names = Vec::new();
    for folder in ["src", "hostccl/src", "hostccl/capi/src", "tool/src"] {
        sources(&root.join(folder), &mut names, &header);
    }
    names.sort();
    names.dedup();
    assert!(names.iter().any(|name| name == "DM_WIRE") && names.len() > 8, "{names:?}");
    let set: Vec<(&str, &str)> = names.iter().map(|name| (name.as_str(), "1")).collect();
    let lines = info(&[], &set);
    let missing: Vec<&String> =
        names.iter().filter(|name| !said(&lines, "variables").contains(&format!("{name}="))).collect();
    assert!(missing.is_empty(), "not in the list of `devicemesh info`: {missing:?}");
}
