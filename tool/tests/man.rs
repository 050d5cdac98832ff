//! `devicemesh man`, with the real binary.

use std::process::{Command, Output};

fn man(arguments: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_devicemesh")).arg("man").args(arguments).output().unwrap()
}

fn page(arguments: &[&str]) -> String {
    let output = man(arguments);
    assert!(output.status.success(), "{output:?}");
    String::from_utf8(output.stdout).unwrap()
}

#[test]
fn the_page_of_each_subcommand_is_printed() {
    assert!(page(&[]).contains("\n.TH \"devicemesh\" 1 ") || page(&[]).starts_with(".TH \"devicemesh\" 1 "));
    for (name, option) in [("run", "failure\\-grace"), ("check", "fail\\-slow"), ("ps", "json"), ("help", "COMMAND")] {
        let page = page(&[name]);
        assert!(page.contains(&format!(".TH \"devicemesh\\-{name}\" 1 ")) && page.contains(option), "{page}");
    }
}

#[test]
fn the_synopsis_has_the_values_of_options() {
    let run = page(&["run"]);
    let synopsis = run.split(".SH ").find(|part| part.starts_with("SYNOPSIS")).unwrap();
    for option in [
        "[\\fB\\-n\\fR|\\fB\\-\\-nproc\\-per\\-node\\fR\\ \\fIN\\fR]\n",
        "[\\fB\\-x\\fR\\ \\fINAME[=VALUE]\\fR]...\n",
        "[\\fB\\-\\-prefix\\fR]\n",
        "[\\fB\\-\\-\\fR] \\fIPROGRAM\\fR [\\fIARGUMENT\\fR]...\n",
    ] {
        assert!(synopsis.contains(option), "{option} {synopsis}");
    }
    assert!(!synopsis.contains("agent\\fR\\ \\fIAGENT"), "a hidden option: {synopsis}");
}

#[test]
fn the_help_has_all_variables_that_the_ranks_get() {
    let tool = |arguments: &[&str]| {
        let output = Command::new(env!("CARGO_BIN_EXE_devicemesh")).args(arguments).env_clear().output().unwrap();
        assert!(output.status.success(), "{output:?}");
        String::from_utf8(output.stdout).unwrap()
    };
    let variables = tool(&["run", "-n", "2", "--", "/usr/bin/env"]);
    let help = tool(&["run", "--help"]);
    let (_, listed) = help.split_once("The ranks get:").unwrap();
    let words: Vec<&str> = listed.split([' ', ',', '\n', '=']).collect();
    // A tool that was built to count lines sets variables for the next process.
    let names = variables.lines().filter_map(|line| Some(line.split_once('=')?.0));
    for name in names.filter(|name| !name.starts_with("__LLVM_PROFILE")) {
        assert!(words.contains(&name), "{name}: {listed}");
    }
}

#[test]
fn a_page_that_is_not_there_is_refused() {
    for (arguments, said) in
        [(&["check", "--dir", "/tmp"][..], "cannot be used with"), (&["none"], "there are run, store, ps, ")]
    {
        let output = man(arguments);
        assert_eq!(output.status.code(), Some(2), "{output:?}");
        let told = String::from_utf8(output.stderr).unwrap();
        assert!(told.contains(said) && !told.contains("agent"), "{told}");
    }
}
