//! Text from outside the tool: an empty secret, which would admit everybody, and text that would
//! move a terminal's cursor.

use std::process::{Command, Output};

/// Runs the tool without this process's place in a job.
fn tool(arguments: &[&str], variables: &[(&str, &str)]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_devicemesh"));
    for name in ["RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "DM_STORE_SECRET"] {
        command.env_remove(name);
    }
    command.args(arguments).envs(variables.iter().copied()).output().unwrap()
}

fn text(output: &Output) -> String {
    String::from_utf8_lossy(&output.stdout).into_owned() + &String::from_utf8_lossy(&output.stderr)
}

#[test]
fn the_tool_refuses_an_empty_secret() {
    let output = tool(&["run", "-n", "1", "true"], &[("DM_STORE_SECRET", "")]);
    assert_eq!(output.status.code(), Some(1), "{}", text(&output));
    assert!(text(&output).contains("DM_STORE_SECRET is set but empty"), "{}", text(&output));
}

#[test]
fn nothing_from_outside_moves_a_terminals_cursor() {
    let hostile = "\x1b[31mred\nline\u{9b}2J\u{202e}";
    let is_plain = |text: &str| !text.chars().any(|c| c != '\n' && (c.is_control() || c == '\u{202e}'));
    let place = [("RANK", "1"), ("WORLD_SIZE", "2"), ("MASTER_ADDR", hostile), ("MASTER_PORT", "1")];
    for (arguments, variables) in [
        (&["info"][..], &place[..]),
        (&["info", "--store", hostile][..], &[][..]),
        (&["run", "-n", "1", "--log-dir", "/proc/none/\x1b[31m", "true"][..], &[][..]),
        (&["run", "-n", "1", "/no/\x1b[31mprogram"][..], &[][..]),
        (&["show", "2,2", "a,b", "--slice", "no\u{9b}such"][..], &[][..]),
    ] {
        let output = tool(arguments, variables);
        assert!(is_plain(&text(&output)), "{arguments:?}: {:?}", text(&output));
    }
}
