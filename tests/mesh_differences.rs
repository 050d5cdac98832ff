//! The cases in which this library answers otherwise than PyTorch's DeviceMesh (2.15) on purpose.
//! There is a test for each case, with the answer of PyTorch (tests/vectors/torch_facts.txt) and
//! the reason. tests/mesh_vectors.rs holds all other answers against PyTorch's.

use devicemesh::error::{Result, Status};
use devicemesh::mesh::{Mesh, MeshSpec};

const DIMS: [&str; 3] = ["dp", "cp", "tp"];

/// Returns the mesh (dp=2, cp=2, tp=2) as rank 5 sees it, which is at (1, 0, 1).
fn cube() -> Mesh {
    let spec = MeshSpec::new("cpu", &[2, 2, 2], 8, 5).names(&DIMS);
    Mesh::new(&spec).unwrap()
}

/// Returns a mesh of one dimension over all eight ranks of the world, or fewer, in the order
/// listed.
fn listed(ranks: &[i32], rank: usize) -> Result<Mesh> {
    let shape = [ranks.len()];
    let spec = MeshSpec::new("cpu", &shape, 8, rank).names(&["x"]).ranks(ranks);
    Mesh::new(&spec)
}

fn refused<T: std::fmt::Debug>(outcome: Result<T>, values: &[&str]) {
    let error = outcome.unwrap_err();
    assert_eq!(error.status(), Status::InvalidArgument, "{error}");
    assert!(values.iter().all(|value| error.message().contains(value)), "{error} should name {values:?}");
}

/// PyTorch raises KeyError, "Mesh dim indices should be in ascending order", though its
/// documentation shows mesh["cp", "dp"]. A caller who writes the names in that order asks for the
/// transposed view, which costs nothing.
#[test]
fn slices_take_names_in_any_order() {
    let mesh = cube();
    let transposed = mesh.slice(&["cp", "dp"]).unwrap();
    assert_eq!(transposed.ranks(), [1, 5, 3, 7]);
    assert_eq!(transposed.coordinate().unwrap(), [0, 1]);
    assert_eq!(mesh.slice(&["dp", "cp"]).unwrap().ranks(), [1, 3, 5, 7]);
    let flat = mesh.slice(&["tp", "dp"]).unwrap().flatten(Some("tp_dp")).unwrap();
    assert_eq!(flat.ranks(), [0, 4, 1, 5]);
}

/// In PyTorch the root alone knows the name of a flattened dimension ("Valid mesh_dim_names are
/// ['dp', 'cp']" on a view). A function that is handed a view should not need the root to find
/// what the view holds. On the other side, a view does not answer for ranks that it does not have:
/// PyTorch's get_group("dp_tp") of the view ("dp", "cp") gives the root's.
#[test]
fn flattened_names_are_known_to_every_view_that_holds_their_dimensions() {
    let mesh = cube();
    let pair = mesh.slice(&["dp", "cp"]).unwrap();
    pair.flatten(Some("dpcp")).unwrap().publish().unwrap();
    mesh.slice(&["dp", "tp"]).unwrap().flatten(Some("dptp")).unwrap().publish().unwrap();
    assert_eq!(pair.slice(&["dpcp"]).unwrap().ranks(), [1, 3, 5, 7]);
    assert_eq!(mesh.slice(&["dpcp", "tp"]).unwrap().ranks(), [0, 1, 2, 3, 4, 5, 6, 7]);
    let error = pair.slice(&["dptp"]).unwrap_err();
    assert_eq!(error.status(), Status::NotFound);
    assert!(error.message().contains("dptp") && error.message().contains("dpcp"), "{error}");
}

/// In PyTorch, `_flatten` compares the name with those of the root alone, so a view may have two
/// dimensions of one name. Here a name means one thing.
#[test]
fn a_flattened_dimension_does_not_take_the_name_of_a_dimension_of_its_view() {
    let view = cube().unflatten("tp", &[2], &["u"]).unwrap();
    refused(view.flatten(Some("u")), &["u is already a dimension of DeviceMesh((dp=2, cp=2, u=2)"]);
    refused(view.flatten(Some("tp")), &["tp is already a dimension of DeviceMesh((dp=2, cp=2, tp=2)"]);
}

/// A view of PyTorch's is never equal to a mesh of its own with the same ranks and names. Here
/// meshes are compared by value.
#[test]
fn a_view_equals_a_mesh_of_the_same_ranks_and_names() {
    let view = cube().slice(&["dp"]).unwrap();
    let spec = MeshSpec::new("cpu", &[2], 8, 5).names(&["dp"]);
    assert!(view.equals(&Mesh::new(&spec.ranks(&[1, 5])).unwrap()));
}

/// PyTorch's new_group sorts its ranks. So in DeviceMesh("cpu", [5, 3, 1, 7, 0, 2, 4, 6]) rank 5
/// has coordinate 0 but group rank 5, and a program that sends to "the next coordinate" sends to
/// the wrong rank. Here coordinate, local rank and rank in the communicator are one number.
#[test]
fn groups_of_permuted_meshes_keep_the_order_of_coordinates() {
    let order = [5, 3, 1, 7, 0, 2, 4, 6];
    for (coordinate, rank) in order.iter().enumerate() {
        let mesh = listed(&order, *rank as usize).unwrap();
        assert_eq!(mesh.group_ranks(0).unwrap(), order);
        assert_eq!((mesh.coordinate().unwrap(), mesh.local_rank(0).unwrap()), (vec![coordinate], coordinate));
        assert_eq!(mesh.split_color_key(0).unwrap().1 as usize, coordinate);
    }
    let mesh = cube();
    let (dp, tp) = (mesh.slice(&["dp"]).unwrap(), mesh.slice(&["tp"]).unwrap());
    let flat = Mesh::concatenate(&[&tp, &dp]).unwrap().flatten(Some("flat")).unwrap();
    assert_eq!((flat.group_ranks(0).unwrap(), flat.local_rank(0).unwrap()), (vec![0, 4, 1, 5], 3));
}

/// PyTorch makes DeviceMesh("cpu", [[0, 1], [0, 1]]), whose ranks are in two places at once. It
/// refuses only a group that holds a rank twice. No rank can be at two coordinates, so the mesh is
/// wrong, and the ranks that are missing would hang.
#[test]
fn a_rank_is_listed_once() {
    let spec = MeshSpec::new("cpu", &[2, 2], 8, 0);
    refused(Mesh::new(&spec.ranks(&[0, 1, 0, 1])), &["rank 0", "index 0", "index 2"]);
}

/// PyTorch looks at the ranks of the groups that it makes. So it makes a mesh with a rank that
/// does not exist where this process is in no group with that rank. The error should come on every
/// rank.
#[test]
fn ranks_outside_the_world_are_refused_on_every_rank() {
    for rank in 0..8 {
        refused(listed(&[0, 1, 2, 8], rank), &["rank 8", "index 3", "0 to 7"]);
        refused(listed(&[0, -1], rank), &["rank -1"]);
    }
}

/// PyTorch fails with an assertion without a message.
#[test]
fn sizes_of_zero_are_refused_with_words() {
    let spec = MeshSpec::new("cpu", &[2, 0], 8, 0);
    refused(Mesh::new(&spec), &["dimension 1", "size 0"]);
    refused(cube().unflatten("dp", &[2, 0], &["a", "b"]), &["size 1", "dp"]);
}

/// PyTorch's _unflatten gives ('cp', 'cp', 'cp', 'tp'), and so does concatenation. A name then
/// finds the first of them. Here a name means one thing.
#[test]
fn names_are_not_repeated_whatever_they_come_from() {
    let mesh = cube();
    refused(mesh.slice(&["dp", "dp"]), &["dp"]);
    refused(mesh.unflatten("dp", &[2, 1], &["cp", "x"]), &["cp"]);
    refused(mesh.unflatten("dp", &[2, 1], &["x", "x"]), &["x"]);
    let flat = mesh.slice(&["dp"]).unwrap().unflatten("dp", &[2], &["tp"]).unwrap();
    refused(Mesh::concatenate(&[&flat, &mesh.slice(&["tp"]).unwrap()]), &["tp"]);
    refused(mesh.reshape(&[2, 4], &["a", "a"]), &["a"]);
    refused(Mesh::new(&MeshSpec::new("cpu", &[2, 4], 8, 0).names(&["a", "a"])), &["a"]);
}

/// PyTorch's DeviceMesh(...) does not look at the names.
#[test]
fn each_dimension_has_one_name_of_at_least_one_character() {
    refused(Mesh::new(&MeshSpec::new("cpu", &[2, 4], 8, 0).names(&["a", ""])), &["dimension 1", "empty"]);
    refused(Mesh::new(&MeshSpec::new("cpu", &[8], 8, 0).names(&["a", "b"])), &["2", "1"]);
}

/// In PyTorch a mesh without mesh_dim_names cannot be sliced, flattened or asked by name. Here its
/// dimensions are dim_0, dim_1 and so on, the names that PyTorch's own group descriptions use
/// ("mesh_dim_0"). These names are not printed.
#[test]
fn dimensions_always_have_names() {
    let spec = MeshSpec::new("cpu", &[2, 4], 8, 6);
    let mesh = Mesh::new(&spec).unwrap();
    assert_eq!(mesh.dim_names(), ["dim_0", "dim_1"]);
    assert_eq!(mesh.slice(&["dim_1"]).unwrap().ranks(), [4, 5, 6, 7]);
    assert_eq!(mesh.describe(), "DeviceMesh((2, 4), 'cpu', stride=(4, 1))");
}

/// PyTorch compares roots by their rank maps, so views of two meshes that happen to be equal can
/// be put side by side. Here views share the communicators of their root, and nobody could say
/// with which root such a result ends.
#[test]
fn views_of_different_roots_are_not_put_side_by_side() {
    let (ours, theirs) = (cube(), cube());
    assert!(ours.equals(&theirs));
    let (dp, tp) = (ours.slice(&["dp"]).unwrap(), theirs.slice(&["tp"]).unwrap());
    refused(Mesh::concatenate(&[&dp, &tp]), &["different root meshes"]);
    assert_eq!(Mesh::concatenate(&[&dp, &ours.slice(&["tp"]).unwrap()]).unwrap().ranks(), [0, 1, 4, 5]);
}
