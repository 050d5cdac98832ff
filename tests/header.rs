//! include/devicemesh.h is what cbindgen makes of src/ffi. `UPDATE_HEADER=1` (make header) writes it; else a difference fails.

use std::path::Path;

/// In the order in which a reader wants them.
const SOURCES: [&str; 14] = [
    "types",
    "errors",
    "world",
    "make",
    "text",
    "views",
    "ask",
    "neighbors",
    "sharding",
    "topology",
    "communicators",
    "collectives",
    "life",
    "registry",
];

fn generate(root: &Path) -> String {
    let config = cbindgen::Config::from_file(root.join("cbindgen.toml")).expect("cbindgen.toml is readable");
    let mut builder = cbindgen::Builder::new().with_config(config);
    for source in SOURCES {
        builder = builder.with_src(root.join("src/ffi").join(source).with_extension("rs"));
    }
    let mut header = Vec::new();
    builder.generate().expect("cbindgen understands src/ffi").write(&mut header);
    tidy(&String::from_utf8(header).expect("the header is UTF-8"))
}

/// Rust's safety sections speak to Rust callers; in C the text before them says the same.
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
        // The guard's end is in the trailer, after the initialisers.
        if line.starts_with("#endif")
            && line.contains("DEVICEMESH_H")
            && lines.iter().all(|seen| !seen.contains("---- initialisers"))
        {
            continue;
        }
        lines.push(line.trim_end());
    }
    lines.join("\n") + "\n"
}

#[test]
fn header_is_generated_from_the_sources() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let path = root.join("include/devicemesh.h");
    let generated = generate(root);
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
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let header = generate(root);
    for source in std::fs::read_dir(root.join("src/ffi")).unwrap() {
        let text = std::fs::read_to_string(source.unwrap().path()).unwrap();
        let exports = text.split("extern \"C\" fn dm_").skip(1).filter_map(|rest| rest.split('(').next());
        for name in exports {
            assert!(header.contains(&format!("dm_{name}(")), "dm_{name} is exported but not in the header");
        }
    }
}
