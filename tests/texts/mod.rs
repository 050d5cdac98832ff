//! The check of meshes as text that the tests and the fuzz target share.

use devicemesh::error::Status;
use devicemesh::mesh::{Mesh, MeshText};
use serde_json::Value;

/// Returns the ranks that a text says. It follows the description of the format alone.
pub fn read(text: &str) -> Vec<i64> {
    let value: Value = serde_json::from_str(text).unwrap();
    let list = |value: &Value| value.as_array().unwrap().clone();
    let mut positions = vec![value["base"].as_u64().unwrap() as usize];
    for pair in list(&value["layout"]).iter().flat_map(list) {
        let (size, stride) = (pair[0].as_u64().unwrap() as usize, pair[1].as_u64().unwrap() as usize);
        positions = positions.iter().flat_map(|at| (0..size).map(move |digit| at + digit * stride)).collect();
    }
    let runs = list(&value["ranks"]);
    let at = |mut position: i64| {
        for run in &runs {
            let (first, count) = (run[0].as_i64().unwrap(), run[1].as_i64().unwrap());
            if position < count {
                return first + position * run.get(2).map_or(1, |step| step.as_i64().unwrap());
            }
            position -= count;
        }
        panic!("ranks end before the layout in {text}");
    };
    positions.into_iter().map(|position| at(position as i64)).collect()
}

/// Checks that two views are equal in every way that a text carries.
pub fn same(ours: &Mesh, theirs: &Mesh) {
    assert_eq!((ours.shape(), ours.dim_names()), (theirs.shape(), theirs.dim_names()));
    assert_eq!((ours.device_type(), ours.ranks()), (theirs.device_type(), theirs.ranks()));
    assert!(ours.equals(theirs) && theirs.equals(ours));
    assert_eq!(ours.hash(), theirs.hash());
}

/// Checks what holds for any text, as `rank` of a world sees it. The text is refused in one line,
/// or it means what the reader above reads.
pub fn check_any_text(text: &str, world_size: usize, rank: usize) {
    match MeshText::parse(text).and_then(|parsed| parsed.mesh(world_size, rank)) {
        Err(error) => {
            assert_eq!(error.status(), Status::InvalidArgument, "{text}");
            assert!(!error.message().contains('\n') && !error.message().is_empty());
        }
        Ok(mesh) => {
            assert_eq!(read(text), mesh.ranks().iter().map(|rank| i64::from(*rank)).collect::<Vec<_>>(), "{text}");
            let again = MeshText::parse(&mesh.serialize()).and_then(|parsed| parsed.mesh(world_size, rank));
            same(&mesh, &again.expect("what was written is read"));
        }
    }
}
