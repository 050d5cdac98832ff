//! Replays the fuzzer's corpus of call sequences, so that a defect that was found once does not
//! come back.

mod abi;
mod corpus;

use std::path::Path;

const HOME: &str = env!("CARGO_MANIFEST_DIR");

#[test]
fn the_corpus_keeps_the_contract() {
    let inputs = corpus::inputs("abi");
    for (place, bytes) in &inputs {
        println!("{place}");
        abi::check_any_calls(bytes);
    }
    assert!(inputs.len() >= 30, "{} inputs", inputs.len());
}

#[test]
fn every_function_of_the_header_is_among_the_calls() {
    let sources: String = std::fs::read_dir(Path::new(HOME).join("tests/abi"))
        .unwrap()
        .map(|entry| std::fs::read_to_string(entry.unwrap().path()).unwrap())
        .collect();
    let header = std::fs::read_to_string(Path::new(HOME).join("include/devicemesh.h")).unwrap();
    let declared = header.lines().filter(|line| !line.starts_with(" *") && !line.starts_with('#')).filter_map(|line| {
        let name = line.split('(').next()?.rsplit([' ', '*']).next()?;
        (line.contains('(') && name.starts_with("dm_")).then_some(name)
    });
    let names: Vec<&str> = declared.collect();
    assert!(names.len() > 50, "functions of the header: {names:?}");
    let missing: Vec<&&str> = names.iter().filter(|name| !sources.contains(&format!("{name}("))).collect();
    assert!(missing.is_empty(), "not called by tests/abi: {missing:?}");
}
