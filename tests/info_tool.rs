//! `devicemesh info`, with the real binary.

use std::process::Command;

/// The lines by their first word, in an environment of these variables alone.
fn info(arguments: &[&str], variables: &[(&str, &str)]) -> Vec<(String, String)> {
    let mut command = Command::new(env!("CARGO_BIN_EXE_devicemesh"));
    let output = command.arg("info").args(arguments).env_clear().envs(variables.iter().copied()).output().unwrap();
    assert!(output.status.success(), "{output:?}");
    let text = String::from_utf8(output.stdout).unwrap();
    let split = |line: &str| line.split_once(' ').map(|(what, said)| (what.to_owned(), said.trim().to_owned()));
    text.lines().filter_map(split).collect()
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
