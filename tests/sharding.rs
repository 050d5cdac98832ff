//! Blocks of tensors: the answers of PyTorch's DTensor (tests/vectors/generate_dtensor_shards.py),
//! and that blocks cover a tensor.

use std::path::Path;

use devicemesh::error::Status;
use devicemesh::mesh::{Mesh, MeshSpec};
use devicemesh::sharding::{Placement, chunk, local_shard};
use proptest::prelude::*;
use serde_json::Value;

fn numbers(value: &Value) -> Vec<usize> {
    value.as_array().unwrap().iter().map(|number| number.as_u64().unwrap() as usize).collect()
}

fn placement(value: &Value) -> Placement {
    match value.as_array() {
        None => Placement::Replicate,
        Some(shard) => Placement::Shard {
            tensor_dim: shard[0].as_u64().unwrap() as usize,
            order: shard[1].as_i64().unwrap() as i32,
        },
    }
}

/// Returns the case's view as `rank` sees it.
fn view(case: &Value, rank: usize) -> Mesh {
    let names: Vec<&str> = case["names"].as_array().unwrap().iter().map(|name| name.as_str().unwrap()).collect();
    let ranks: Option<Vec<i32>> =
        case["ranks"].as_array().map(|ranks| ranks.iter().map(|rank| rank.as_i64().unwrap() as i32).collect());
    let shape = numbers(&case["shape"]);
    let mut spec = MeshSpec::new("cpu", &shape, case["world"].as_u64().unwrap() as usize, rank).names(&names);
    spec.ranks = ranks.as_deref();
    let root = Mesh::new(&spec).unwrap();
    let mut picks = Vec::new();
    for name in case["view"].as_array().unwrap() {
        let name = name.as_str().unwrap();
        let flat = name.replace('+', "_");
        if name != flat {
            let parts: Vec<&str> = name.split('+').collect();
            root.slice(&parts).unwrap().flatten(Some(&flat)).unwrap().publish().unwrap();
        }
        picks.push(flat);
    }
    root.slice(&picks.iter().map(String::as_str).collect::<Vec<_>>()).unwrap()
}

#[test]
fn every_block_is_dtensors() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/vectors/torch_dtensor_shards.jsonl");
    let (mut cases, mut answers, mut empty, mut strided) = (0, 0, 0, 0);
    for line in std::fs::read_to_string(path).unwrap().lines() {
        let case: Value = serde_json::from_str(line).unwrap();
        cases += 1;
        let placements: Vec<Placement> = case["placements"].as_array().unwrap().iter().map(placement).collect();
        let tensor = numbers(&case["tensor"]);
        for answer in case["answers"].as_array().unwrap() {
            let rank = answer[0].as_u64().unwrap() as usize;
            let theirs = (numbers(&answer[1]), numbers(&answer[2]));
            let mesh = view(&case, rank);
            let ours = local_shard(&mesh, None, &placements, &tensor).unwrap();
            assert_eq!((&ours.shape, &ours.offset), (&theirs.0, &theirs.1), "rank {rank} of {line}");
            // Any other rank of this view that asks about this rank gets an equal answer.
            let other = view(&case, *mesh.ranks().last().unwrap() as usize);
            let asked = local_shard(&other, Some(rank as i32), &placements, &tensor).unwrap();
            assert_eq!(asked, ours, "rank {rank} asked from {} of {line}", other.rank());
            answers += 1;
            empty += usize::from(theirs.0.contains(&0));
            strided += usize::from(answer.get(3).is_some());
        }
    }
    println!(
        "{cases} cases, {answers} blocks agree, {empty} of them empty; {strided} that _StridedShard cuts otherwise"
    );
    assert_eq!((cases, answers, strided), (252, 1083, 8), "the file is whole");
}

/// Returns what is left of a tensor's dimension after a list of splits. It cuts lists of indices:
/// each split cuts the list and keeps one piece.
fn held(size: usize, splits: &[(usize, usize)]) -> Vec<usize> {
    let mut indices: Vec<usize> = (0..size).collect();
    for &(parts, index) in splits {
        let full = indices.len().div_ceil(parts).max(1);
        indices = indices.chunks(full).nth(index).unwrap_or_default().to_vec();
    }
    indices
}

fn placements(ndim: usize) -> impl Strategy<Value = Vec<Placement>> {
    let shard = (0..2usize, -1..3i32).prop_map(|(tensor_dim, order)| Placement::Shard { tensor_dim, order });
    prop::collection::vec(prop_oneof![1 => Just(Placement::Replicate), 4 => shard], ndim)
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 512, ..ProptestConfig::default() })]

    #[test]
    fn blocks_are_what_lists_of_indices_say_and_cover_the_tensor(
        (shape, placements) in prop::collection::vec(1..5usize, 1..4).prop_flat_map(|shape| {
            let ndim = shape.len();
            (Just(shape), placements(ndim))
        }),
        tensor in [0..40usize, 0..40usize],
    ) {
        let size: usize = shape.iter().product();
        let mesh = Mesh::new(&MeshSpec::new("cpu", &shape, size, 0)).unwrap();
        let replicated = placements.iter().zip(&shape).filter(|(placement, _)| **placement == Placement::Replicate);
        let replicas: usize = replicated.map(|(_, size)| size).product();
        let mut times_held = vec![0; tensor[0] * tensor[1]];
        for rank in 0..size as i32 {
            let coordinate = mesh.coordinate_of(rank).unwrap();
            let shard = local_shard(&mesh, Some(rank), &placements, &tensor).unwrap();
            for (dim, &size) in tensor.iter().enumerate() {
                let mut splits: Vec<(i32, usize)> = placements.iter().enumerate().filter_map(|(index, placement)| match placement {
                    Placement::Shard { tensor_dim, order } if *tensor_dim == dim => Some((*order, index)),
                    _ => None,
                }).collect();
                splits.sort();
                let splits: Vec<(usize, usize)> = splits.iter().map(|(_, index)| (shape[*index], coordinate[*index])).collect();
                let indices = held(size, &splits);
                prop_assert_eq!(shard.shape[dim], indices.len());
                prop_assert_eq!(shard.offset[dim], indices.first().copied().unwrap_or(if splits.is_empty() { 0 } else { size }));
            }
            for row in shard.offset[0]..shard.offset[0] + shard.shape[0] {
                for column in shard.offset[1]..shard.offset[1] + shard.shape[1] {
                    times_held[row * tensor[1] + column] += 1;
                }
            }
        }
        prop_assert!(times_held.iter().all(|times| *times == replicas), "each element once in each replica");
    }

    #[test]
    fn chunks_of_any_size_stay_inside(size: usize, parts in 0..usize::MAX, index: usize) {
        let (start, length) = chunk(size, parts, index);
        prop_assert!(start.checked_add(length).is_some_and(|end| end <= size));
        prop_assert!(length <= size.div_ceil(parts.max(1)));
    }
}

#[test]
fn what_is_wrong_is_said_with_its_values() {
    let names = ["dp", "tp"];
    let ranks = [7, 5, 3, 1];
    let spec = MeshSpec::new("cpu", &[2, 2], 8, 0).names(&names).ranks(&ranks);
    let mesh = Mesh::new(&spec).unwrap();
    let refused = |rank, placements: &[Placement]| local_shard(&mesh, rank, placements, &[4, 4]).unwrap_err();
    let rows = Placement::Shard { tensor_dim: 2, order: 0 };
    let error = refused(Some(7), &[Placement::Replicate, rows]);
    assert_eq!(
        (error.status(), error.message()),
        (
            Status::InvalidArgument,
            "mesh dimension tp shards tensor dimension 2, but the tensor has 2 dimensions, counted from 0"
        )
    );
    assert_eq!(refused(Some(7), &[rows]).status(), Status::InvalidArgument);
    let replicated = [Placement::Replicate; 2];
    for rank in [None, Some(0), Some(8), Some(i32::MAX), Some(-3)] {
        let error = refused(rank, &replicated);
        let named = format!("rank {} is not in DeviceMesh", rank.unwrap_or(0));
        assert!(error.status() == Status::NotMember && error.message().starts_with(&named), "{error}");
    }
}
