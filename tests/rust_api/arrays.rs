//! Meshes from arrays of ranks.

use devicemesh::comm::{Operator, View};
use devicemesh::error::Status;
use devicemesh::mesh::Mesh;
use devicemesh::ndarray::{Array, Array2, ArrayD, Axis, array, s};

use super::in_worlds;

#[test]
fn a_mesh_from_an_array_of_ranks_reduces_along_the_arrays_axes() {
    in_worlds(5, |world, rank| {
        // Rank 2 of the world is not in the mesh. The array is a view with strides of its own:
        // every other column of another one, transposed.
        let wide = array![[4, 9, 0], [1, 9, 3]];
        let ranks = wide.slice(s![.., ..;2]).reversed_axes();
        assert_eq!(ranks, array![[4, 1], [0, 3]]);
        let view = View::from_rank_array(world, ranks, &["dp", "tp"]).unwrap();
        let mesh = view.mesh();
        assert_eq!(mesh.rank_array(), ranks.into_dyn());
        let Some((at, _)) = ranks.indexed_iter().find(|(_, known)| **known == rank as i32) else {
            assert_eq!(rank, 2);
            assert_eq!(mesh.coordinate().unwrap_err().status(), Status::NotMember);
            return;
        };
        assert_eq!(mesh.coordinate().unwrap(), [at.0, at.1]);
        for (axis, name, other) in [(0, "dp", at.1), (1, "tp", at.0)] {
            let lane = ranks.index_axis(Axis(1 - axis), other);
            assert_eq!(mesh.group_ranks(axis).unwrap(), lane.to_vec());
            let mut sum = [rank as i32];
            view.all_reduce(name, &mut sum, Operator::Sum).unwrap();
            assert_eq!(sum, [lane.sum()]);
        }
        view.root_comms().finalize().unwrap();
    });
}

#[test]
fn ranks_that_give_different_arrays_are_told_so() {
    let errors = in_worlds(2, |world, rank| {
        let ranks = if rank == 0 { array![[0], [1]] } else { array![[1], [0]] };
        View::from_rank_array(world, ranks.view(), &["dp", "tp"]).err().unwrap()
    });
    for error in errors {
        assert_eq!(error.status(), Status::Mismatch, "{error}");
        assert!(error.message().contains("ranks=(1, 0)"), "{error}");
    }
}

#[test]
fn an_array_that_is_no_mesh_is_refused_with_its_values() {
    let refused = |array: ArrayD<i32>, names: Option<&[&str]>, words: &str| {
        let error = Mesh::from_rank_array("cpu", array.view(), names, 4, 0).unwrap_err();
        assert_eq!(error.status(), Status::InvalidArgument, "{error}");
        assert!(error.message().contains(words), "{error}, expected {words}");
    };
    refused(array![[0, 1], [2, 1]].into_dyn(), None, "rank 1 is listed twice, at index 1 and index 3");
    refused(array![[0, 1], [2, 4]].into_dyn(), None, "rank 4 at index 3 is out of range: the world has ranks 0 to 3");
    refused(array![-1].into_dyn(), None, "rank -1 at index 0 is out of range");
    refused(Array2::<i32>::zeros((2, 0)).into_dyn(), None, "dimension 1 has size 0");
    refused(Array::from_iter(0..5).into_dyn(), None, "a mesh of shape (5) has 5 ranks, but the world has 4");
    refused(array![[0, 1]].into_dyn(), Some(&["dp"]), "the shape has 2 dimensions, but there is 1 name");
    // One element that is said to be there 2^40 times is refused before anything of that size is
    // made.
    let one = array![0];
    let error = Mesh::from_rank_array("cpu", one.broadcast((1 << 20, 1 << 20)).unwrap(), None, 4, 0).unwrap_err();
    assert!(error.message().contains("1099511627776 ranks, but the world has 4"), "{error}");
    // An array without dimensions is a mesh of one rank.
    let point = Mesh::from_rank_array("cpu", ndarray_of_one(3).view(), None, 4, 3).unwrap();
    assert_eq!((point.ndim(), point.size(), point.rank_array()), (0, 1, ndarray_of_one(3)));
}

fn ndarray_of_one(rank: i32) -> ArrayD<i32> {
    ArrayD::from_elem(vec![], rank)
}
