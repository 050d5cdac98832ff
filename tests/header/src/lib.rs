//! include/devicemesh.h is the header that cbindgen makes from src/ffi. The test here fails when
//! the two differ (`make check`). With `UPDATE_HEADER=1` (`make header`) the test writes the file
//! first.

use std::path::{Path, PathBuf};

/// The source files with the headings of their functions, in the order in which a reader wants
/// them.
const SOURCES: [(&str, &str); 21] = [
    ("types", "types"),
    ("structs", "types"),
    ("errors", "errors and versions"),
    ("logging", "the log"),
    ("world", "the world"),
    ("world_info", "the world"),
    ("make", "making meshes"),
    ("text", "meshes as text"),
    ("views", "views of a mesh"),
    ("ask", "questions to a mesh"),
    ("neighbors", "other ranks along a dimension"),
    ("sharding", "what a rank holds"),
    ("topology", "rank plans"),
    ("communicators", "raw communicators"),
    ("collectives", "collectives"),
    ("ragged", "collectives with a count for each rank"),
    ("control", "the control plane: barriers and bytes"),
    ("life", "life and death of a mesh"),
    ("recovery", "recovery from lost ranks"),
    ("registry", "meshes by name"),
    ("events", "events and counters"),
];

/// The folder of the project.
fn project() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

/// Returns the text of include/devicemesh.h, made from the sources.
///
/// # Panics
///
/// It panics where cbindgen does not understand a source.
pub fn generate() -> String {
    let root = project();
    let config = cbindgen::Config::from_file(root.join("cbindgen.toml")).expect("cbindgen.toml is readable");
    let mut builder = cbindgen::Builder::new().with_config(config);
    for (source, _) in SOURCES {
        builder = builder.with_src(root.join("src/ffi").join(source).with_extension("rs"));
    }
    let mut header = Vec::new();
    builder.generate().expect("cbindgen understands src/ffi").write(&mut header);
    let functions: Vec<(String, &str)> = SOURCES
        .iter()
        .flat_map(|(source, title)| exports(&root.join("src/ffi").join(source).with_extension("rs"), title))
        .collect();
    let header = String::from_utf8(header).expect("the header is UTF-8").replace("@VERSION@", &version().to_string());
    with_headings(&tidy(&header), &functions)
}

/// The version in Cargo.toml as one number.
fn version() -> u32 {
    let part = |text: &str| text.parse::<u32>().expect("Cargo's versions are numbers");
    10_000 * part(env!("CARGO_PKG_VERSION_MAJOR"))
        + 100 * part(env!("CARGO_PKG_VERSION_MINOR"))
        + part(env!("CARGO_PKG_VERSION_PATCH"))
}

/// Returns the functions of a source file, with the heading of the file.
fn exports<'a>(path: &Path, title: &'a str) -> Vec<(String, &'a str)> {
    let text = std::fs::read_to_string(path).expect("the sources of src/ffi are readable");
    let names = text.split("extern \"C\" fn ").skip(1).filter_map(|rest| rest.split('(').next());
    names.map(|name| (name.to_owned(), title)).collect()
}

/// Puts a line `/* ---- heading ---- */` before the documentation of the first item under that
/// heading. docs/reference makes groups of the headings.
fn with_headings(header: &str, functions: &[(String, &str)]) -> String {
    let mut out = String::new();
    let mut last = "";
    let lines: Vec<&str> = header.lines().collect();
    for (at, line) in lines.iter().enumerate() {
        if *line == "/* ---- initialisers ---- */" {
            last = "initialisers"; // the trailer has it
        }
        if *line == "/**" {
            let item =
                lines[at..].iter().skip_while(|line| line.trim() != "*/").nth(1).expect("every comment has its item");
            let heading = heading(item, functions);
            if heading != last {
                out += &format!("/* ---- {heading} ---- */\n\n");
                last = heading;
            }
        }
        out += &format!("{line}\n");
    }
    out
}

/// Returns the heading of the item that begins with this line.
fn heading<'a>(item: &str, functions: &[(String, &'a str)]) -> &'a str {
    match item.strip_prefix("#define ") {
        Some(name) if name.starts_with("DEVICEMESH_VERSION") => "the version of the header",
        Some(name) if name.starts_with("DM_STATUS_") => "statuses",
        Some(name) if ["DM_SUM", "DM_PROD", "DM_MAX", "DM_MIN", "DM_AVG"].iter().any(|op| name.starts_with(op)) => {
            "reductions"
        }
        Some(name) if ["DM_INT", "DM_UINT", "DM_FLOAT", "DM_BFLOAT"].iter().any(|dtype| name.starts_with(dtype)) => {
            "types of elements"
        }
        Some(name) if name.starts_with("DM_LOG_") => "levels of the log",
        Some(name) if name.contains("_INIT ") => "initialisers",
        Some(name) if name.starts_with("DM_EVENT_") => "kinds of events",
        Some(_) => "flags and placements",
        None if item.starts_with("typedef ") => "types",
        None => {
            let named = functions.iter().find(|(name, _)| item.contains(&format!("{name}(")));
            named.unwrap_or_else(|| panic!("no source file has the function of {item:?}")).1
        }
    }
}

/// Removes Rust's safety sections, which speak to Rust callers. The text before a safety section
/// says the same for C.
fn tidy(header: &str) -> String {
    let mut lines: Vec<&str> = Vec::new();
    let mut skipping = false;
    for line in header.lines() {
        let text = line.trim_start().trim_start_matches('*').trim_start_matches('/').trim();
        if text == "# Safety" {
            skipping = true;
            while lines.last().is_some_and(|last| last.trim() == "*") {
                lines.pop();
            }
        }
        if skipping && !line.trim_end().ends_with("*/") {
            continue;
        }
        skipping = false;
        // The end of the include guard is in the trailer, after the initialisers.
        if line.starts_with("#endif")
            && line.contains("DEVICEMESH_H")
            && lines.iter().all(|seen| !seen.contains("---- initialisers"))
        {
            continue;
        }
        lines.push(line.trim_end());
    }
    lines.iter().map(|line| in_parentheses(line) + "\n").collect()
}

/// A constant below 0 stands in parentheses, as one does in C.
fn in_parentheses(line: &str) -> String {
    match line.strip_prefix("#define ").and_then(|rest| rest.split_once(" -")) {
        Some((name, digits)) if digits.bytes().all(|byte| byte.is_ascii_digit()) => {
            format!("#define {name} (-{digits})")
        }
        _ => line.to_owned(),
    }
}

#[test]
fn header_is_generated_from_the_sources() {
    let path = project().join("include/devicemesh.h");
    let generated = generate();
    if std::env::var_os("UPDATE_HEADER").is_some() {
        std::fs::write(&path, &generated).expect("include/devicemesh.h can be written");
    }
    let committed = std::fs::read_to_string(&path).unwrap_or_default();
    let difference = committed.lines().zip(generated.lines()).position(|(ours, fresh)| ours != fresh);
    assert!(
        committed == generated,
        "include/devicemesh.h differs from src/ffi, first in line {:?}: run `make header` and commit it",
        difference.map(|line| line + 1)
    );
}

#[test]
fn header_has_every_exported_function() {
    let header = generate();
    for source in std::fs::read_dir(project().join("src/ffi")).unwrap() {
        let text = std::fs::read_to_string(source.unwrap().path()).unwrap();
        let exports = text.split("extern \"C\" fn dm_").skip(1).filter_map(|rest| rest.split('(').next());
        for name in exports {
            assert!(header.contains(&format!("dm_{name}(")), "dm_{name} is exported but not in the header");
        }
    }
}
