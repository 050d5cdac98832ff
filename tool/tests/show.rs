//! `devicemesh show`, with the real binary. docs/mesh.md has more of its outputs
//! (tests/test_mesh_page.py), tests/test_show_pictures.py its pictures.

use std::fs::File;
use std::io::Read;
use std::os::fd::FromRawFd;
use std::process::{Command, Output, Stdio};
use std::time::{Duration, Instant};

use serde_json::{Value, json};

fn tool(arguments: &str) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_devicemesh"));
    // The environment of the tests must not decide about colours and widths.
    for name in ["CI", "NO_COLOR", "CLICOLOR", "CLICOLOR_FORCE", "COLUMNS"] {
        command.env_remove(name);
    }
    command.arg("show").args(arguments.split(' ')).env("TERM", "xterm").stdin(Stdio::null());
    command
}

fn run(arguments: &str) -> Output {
    tool(arguments).output().unwrap()
}

fn shown(arguments: &str) -> String {
    let output = run(arguments);
    assert!(output.status.success(), "{arguments}: {}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).unwrap()
}

/// The message about a command line that is refused with code 2.
fn refused(arguments: &str) -> String {
    let output = run(arguments);
    assert_eq!((output.status.code(), output.stdout.len()), (Some(2), 0), "{arguments}");
    String::from_utf8(output.stderr).unwrap()
}

/// The output of the tool on a wide terminal.
fn on_a_terminal(command: &mut Command) -> String {
    on_a_terminal_of(200, command)
}

/// The output of the tool on a terminal of that many columns.
fn on_a_terminal_of(columns: u16, command: &mut Command) -> String {
    let (mut main, mut side) = (0, 0);
    let none = std::ptr::null_mut();
    let size = libc::winsize { ws_row: 24, ws_col: columns, ws_xpixel: 0, ws_ypixel: 0 };
    // SAFETY: the call writes two descriptors and reads the size. Name and settings are not asked
    // for.
    let opened = unsafe { libc::openpty(&mut main, &mut side, none, none.cast(), &size) };
    assert_eq!(opened, 0);
    // SAFETY: both were opened above and have no other owner.
    let (mut main, side) = unsafe { (File::from_raw_fd(main), File::from_raw_fd(side)) };
    let mut child = command.stdout(side).spawn().unwrap();
    command.stdout(Stdio::null());
    let mut text = Vec::new();
    let mut part = [0; 4096];
    // When the last writer has gone, reading a terminal fails.
    while let Ok(count @ 1..) = main.read(&mut part) {
        text.extend_from_slice(&part[..count]);
    }
    assert!(child.wait().unwrap().success());
    String::from_utf8(text).unwrap().replace("\r\n", "\n")
}

#[test]
fn a_mesh_has_its_groups_and_what_they_cross() {
    assert_eq!(
        shown("2,4 dp,tp --rank 6 --hosts 4x2"),
        "\
DeviceMesh((dp=2, tp=4), 'cuda', stride=(4, 1))
8 ranks on 4 hosts of 2; rank 6 is at (dp=1, tp=2)

dimension  size  stride  groups  across hosts  ranks of the groups
dp            2       4       4        4 of 4  {0, 4} {1, 5} *{2, 6} {3, 7}
tp            4       1       2        2 of 2  {0, 1, 2, 3} *{4, 5, 6, 7}
* the groups of rank 6

  tp  0  1  2  3
dp 0  0  1  2  3
dp 1  4  5 [6] 7
"
    );
}

#[test]
fn operations_follow_the_order_of_the_command_line() {
    let cut_first = shown("8,2 pp,tp --range pp=0:4 --unflatten pp=2x2:a,b");
    assert!(
        cut_first.starts_with("DeviceMesh((a=2, b=2, tp=2), 'cuda', stride=(4, 2, 1))\n8 of 16 ranks\n"),
        "{cut_first}"
    );
    let split_first = shown("8,2 pp,tp --unflatten pp=2x4:a,b --range b=0:2");
    assert!(split_first.starts_with("DeviceMesh((a=2, b=2, tp=2)"), "{split_first}");
    assert!(split_first.contains("{0, 8}") && !cut_first.contains("{0, 8}"), "{split_first}");
    // A flattened name can be sliced after it was made, and flattened again.
    assert!(shown("2,2,2 dp,cp,tp --flatten dp,cp=x --slice x,tp").contains("(x=4, tp=2)"));
    assert!(refused("2,2,2 dp,cp,tp --slice x,tp --flatten dp,cp=x").contains("dimension x does not exist"));
    assert!(
        shown("2,2,2 dp,cp,tp --flatten dp,cp=x --flatten x,tp=y")
            .contains("\ny             8       1       1  {0, 1, 2")
    );
}

#[test]
fn ranks_are_where_they_are_put() {
    let text = shown("2,2 dp,tp --ranks 7,5,3,1 --rank 3");
    assert!(text.contains("rank 3 is at (dp=1, tp=0)") && text.contains("*{7, 3} {5, 1}"), "{text}");
    // When ranks are dealt out in turn, the last dimension crosses hosts. With a plan it does not.
    let dealt = shown("2,4 dp,tp --hosts 2x4 --cyclic");
    assert!(dealt.contains("tp            4       1       2        2 of 2  {0, 1, 2, 3}"), "{dealt}");
    let planned = shown("2,4 dp,tp --hosts 2x4 --cyclic --plan");
    assert!(planned.contains("planned for these hosts: cost 64; the usual order of ranks costs 256"), "{planned}");
    assert!(planned.contains("tp            4       1       2            no  {0, 2, 4, 6} {1, 3, 5, 7}"), "{planned}");
}

#[test]
fn json_is_read_as_json() {
    let value: Value =
        serde_json::from_str(&shown(r#"2,2 d"p,t\p --rank 1 --hosts 1x4 --flatten d"p,t\p=a --json"#)).unwrap();
    assert_eq!(value["coordinate"], json!([0, 1]));
    assert_eq!(
        value["dimensions"],
        json!([
            {"name": "d\"p", "size": 2, "layout": [[2, 2]], "groups": 2, "crossing_groups": 0, "group": [1, 3], "ranks": [[0, 2], [1, 3]]},
            {"name": "t\\p", "size": 2, "layout": [[2, 1]], "groups": 2, "crossing_groups": 0, "group": [0, 1], "ranks": [[0, 1], [2, 3]]},
        ])
    );
    assert_eq!((&value["flattened"][0]["name"], &value["flattened"][0]["layout"]), (&json!("a"), &json!([[4, 1]])));
    let large: Value = serde_json::from_str(&shown("1024,1024 --json")).unwrap();
    assert_eq!(
        (&large["size"], &large["ranks"], &large["dimensions"][0]["groups"]),
        (&json!(1 << 20), &Value::Null, &json!(1024))
    );
}

#[test]
fn names_that_share_a_communicator_are_told() {
    let arguments = "2,1,4 pp,dp,tp --flatten pp,dp=all --reshape 2x4:epp,etp";
    let text = shown(arguments);
    assert!(text.contains("\npp, all and epp share one communicator\ntp and etp share one communicator\n"), "{text}");
    let value: Value = serde_json::from_str(&shown(&format!("{arguments} --json"))).unwrap();
    assert_eq!(value["shared_communicators"], json!([["pp", "all", "epp"], ["tp", "etp"]]));
    assert!(!shown("2,4 dp,tp --flatten dp,tp=all").contains("share"), "all has other ranks than dp and tp");
    // A range has communicators of its own.
    assert!(!shown("4,2 pp,tp --range pp=0:2").contains("share"));
}

#[test]
fn colour_is_for_terminals_that_want_it() {
    let plain = shown("2,2 dp,tp --rank 1");
    assert!(!plain.contains('\x1b'));
    let coloured = on_a_terminal(&mut tool("2,2 dp,tp --rank 1"));
    assert!(coloured.contains("\x1b[38;5;16m\x1b[48;5;110m"), "{coloured}");
    assert_eq!(on_a_terminal(tool("2,2 dp,tp --rank 1").env("NO_COLOR", "1")), plain);
    assert_eq!(on_a_terminal(tool("2,2 dp,tp --rank 1").env("TERM", "dumb")), plain);
    assert_eq!(on_a_terminal(&mut tool("2,2 dp,tp --rank 1 --color never")), plain);
    // An empty NO_COLOR does not count (no-color.org).
    assert!(on_a_terminal(tool("2,2 dp,tp --rank 1").env("NO_COLOR", "")).contains('\x1b'));
    assert!(shown("2,2 dp,tp --rank 1 --color always").contains('\x1b'));
}

#[test]
fn nothing_is_wider_than_the_terminal() {
    for arguments in [
        "2,4 dp,tp --rank 6 --hosts 4x2",
        "2,2,2 dp,cp,tp --flatten dp,cp=dpcp --flatten dp,cp,tp=all --rank 7 --hosts 3x4",
        "16,16 replicate,shard --rank 255",
        "4,4,4 dp,cp,tp",
        "1024,128,8 dp,pp,tp --rank 777777 --hosts 131072x8",
        "3,2 a_dimension_with_a_name_that_is_too_long,b --ranks 0,1,2,3,6,7",
    ] {
        let narrow = on_a_terminal_of(60, &mut tool(&format!("{arguments} --color never")));
        let wide = on_a_terminal_of(200, &mut tool(&format!("{arguments} --color never")));
        assert!(narrow.lines().all(|line| line.chars().count() <= 60), "{arguments}:\n{narrow}");
        assert!(wide.lines().all(|line| line.chars().count() <= 200), "{arguments}:\n{wide}");
    }
    // COLUMNS counts where no terminal says its width.
    let line = "2,2,2 dp,cp,tp --rank 3 --hosts 2x4 --color never";
    let narrow = on_a_terminal_of(60, &mut tool(line));
    assert_eq!(String::from_utf8(tool(line).env("COLUMNS", "60").output().unwrap().stdout).unwrap(), narrow);
    assert_eq!(on_a_terminal_of(0, tool(line).env("COLUMNS", "60")), narrow);
    assert_eq!(on_a_terminal_of(60, tool(line).env("COLUMNS", "200")), narrow);
    assert_eq!(
        narrow,
        "\
DeviceMesh((dp=2, cp=2, tp=2), 'cuda', stride=(4, 2, 1))
8 ranks on 2 hosts of 4; rank 3 is at (dp=0, cp=1, tp=1)

dimension  size  stride  groups  across hosts
  ranks of the groups
dp            2       4       4        4 of 4
  {0, 4} {1, 5} {2, 6} *{3, 7}
cp            2       2       4            no
  {0, 2} *{1, 3} {4, 6} {5, 7}
tp            2       1       4            no
  {0, 1} *{2, 3} {4, 5} {6, 7}
* the groups of rank 3

dp 0          dp 1
  tp  0  1      tp  0  1
cp 0  0  1    cp 0  4  5
cp 1  2 [3]   cp 1  6  7
"
    );
}

#[test]
fn hosts_without_ranks_do_not_count() {
    assert!(shown("2,2,2 dp,cp,tp --hosts 3x4").contains("\n8 ranks on 2 of 3 hosts of 4\n"));
    assert!(shown("2,2,2 dp,cp,tp --hosts 3x4 --cyclic").contains("\n8 ranks on 3 hosts of 4, dealt out in turn\n"));
    assert!(shown("2,4 dp,tp --hosts 2x4 --rank 5 --slice tp").contains("\n4 of 8 ranks on 1 of 2 hosts of 4; "));
}

#[test]
fn what_does_not_fit_is_refused_with_the_values() {
    for (arguments, values) in [
        ("2,2 dp", &["the shape has 2 dimensions, but there is 1 name"][..]),
        ("2,0 dp,tp", &["dimension 1 has size 0"]),
        ("2,x dp,tp", &["\"x\" is not a size", "2,2,2"]),
        ("2,2 dp,dp", &["dp is repeated"]),
        ("2,2 dp,tp --rank 4", &["rank 4", "world of 4"]),
        ("2,2 dp,tp --ranks 7,5,3,1 --rank 0", &["rank 0 is not in the mesh", "7, 5, 3, 1"]),
        ("2,2 dp,tp --ranks 7,5,3", &["4 ranks, but 3 are listed"]),
        ("2,2 dp,tp --ranks 0,1,2,-1", &["rank -1 at index 3"]),
        ("2 dp --ranks 0,2147483647", &["rank 2147483647 at index 1"]),
        ("2,2 dp,tp --hosts 2", &["2x4"]),
        ("4,4 dp,tp --hosts 2x4", &["16 ranks", "--hosts 2x4 has 8", "--hosts 4x4"]),
        ("2,2 dp,tp --ranks 0,1,2,9 --hosts 2x4", &["rank 9 at index 3"]),
        ("2,2 dp,tp --plan", &["--hosts"]),
        ("2,2 dp,tp --hosts 2x2 --plan --traffic 1", &["1 traffic weights for 2 dimensions"]),
        ("2,2 dp,tp --hosts 2x2 --plan --ranks 0,1,2,3", &["--plan", "--ranks", "cannot be used with"]),
        ("2,2 dp,tp --svg --html", &["cannot be used with"]),
        ("2,2 dp,tp --color-by cp", &["--color-by cp", "(dp, tp)"]),
        ("2,2 dp,tp --slice pp", &["dimension pp does not exist", "(dp, tp)"]),
        ("2,2 dp,tp --unflatten tp=3x2:a,b", &["(3, 2) is 6", "size 2"]),
        ("2,2 dp,tp --unflatten tp=2", &["tp=2x4:node,chip"]),
        ("2,2 dp,tp --range dp=1:2", &["dimension dp", "2 indices from 1"]),
        ("2,2 dp,tp --range dp=1", &["pp=0:2"]),
        ("4,2 pp,tp --range pp=2:2 --slice tp", &["rank 0", "--rank"]),
        ("2,2 dp,tp --reshape 4x2:a,b", &["8", "4"]),
        ("16,17 --svg", &["up to 256 ranks, this view has 272", "--slice"]),
        ("65536,65536", &["4294967296 ranks", "16777216"]),
        ("18446744073709551615,2", &["more than 2^64"]),
        ("2 a\u{1b}[31m", &["control character"]),
        ("2 a\u{202e}b", &["control character"]),
    ] {
        let said = refused(arguments);
        assert!(values.iter().all(|value| said.contains(value)), "{arguments}: {said}");
    }
}

#[test]
fn an_output_that_cannot_be_written_is_named() {
    let output = run("2 a --svg -o /nonexistent/mesh.svg");
    assert_eq!(output.status.code(), Some(1));
    let said = String::from_utf8(output.stderr).unwrap();
    assert!(said.contains("cannot write /nonexistent/mesh.svg"), "{said}");
    let full = tool("2 a").stdout(File::options().write(true).open("/dev/full").unwrap()).output().unwrap();
    assert_eq!(full.status.code(), Some(1));
    // A reader that closes the pipe is no error.
    let mut child = tool("16,16 --color always").stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    drop(child.stdout.take());
    let output = child.wait_with_output().unwrap();
    assert!(output.status.success() && output.stderr.is_empty());
}

#[test]
fn a_million_ranks_have_a_summary_at_once() {
    let began = Instant::now();
    let text = shown("1024,128,8 dp,pp,tp --rank 777777 --hosts 131072x8");
    assert!(began.elapsed() < Duration::from_secs(20), "{:?}", began.elapsed()); // well below a second, where nobody else builds
    assert!(text.contains("1048576 ranks on 131072 hosts of 8; rank 777777 is at (dp=759, pp=70, tp=1)"), "{text}");
    assert!(text.lines().count() < 10 && text.contains("... 131070 more"), "{text}");
    // A small view of it is listed and drawn.
    assert!(shown("1024,128,8 dp,pp,tp --rank 777777 --slice tp").contains("  777776 [777777] 777778"));
    assert!(shown("1024,128,8 dp,pp,tp --rank 777777 --slice pp,tp --range pp=0:4 --svg").len() > 1000);
}

#[test]
fn names_cannot_break_out_of_a_picture_or_a_page() {
    let name = "<script>alert('x')</script>&\"]]>";
    for form in ["--svg", "--html"] {
        let mut command = tool("2,2");
        let output = command.arg(format!("{name},größe")).args([form, "--rank", "1"]).output().unwrap();
        let text = String::from_utf8(output.stdout).unwrap();
        assert!(!text.contains("<script") && !text.contains("]]>"), "{text}");
        assert!(text.contains("&lt;script&gt;alert(&#39;x&#39;)&lt;/script&gt;&amp;&quot;]]&gt;"), "{text}");
        assert!(text.contains("größe"));
    }
    let long = "n".repeat(30_000);
    assert!(run(&format!("2,2 {long},{long}b --svg")).status.success());
    let text = shown(&format!("2,2 {long},tp"));
    assert!(text.lines().skip(1).all(|line| line.chars().count() < 200), "only the mesh's own line is long");
}
