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
fn a_page_that_is_not_there_is_refused() {
    for (arguments, said) in
        [(&["check", "--dir", "/tmp"][..], "cannot be used with"), (&["none"], "there are run, ps, ")]
    {
        let output = man(arguments);
        assert_eq!(output.status.code(), Some(2), "{output:?}");
        let told = String::from_utf8(output.stderr).unwrap();
        assert!(told.contains(said) && !told.contains("agent"), "{told}");
    }
}
