//! Random chains of mesh operations against a model that holds what strides only describe: the list of ranks with named axes.

use devicemesh::mesh::{Mesh, MeshSpec};
use proptest::prelude::*;

/// A view as an explicit array.
#[derive(Debug, Clone)]
struct Model {
    axes: Vec<(String, usize)>,
    /// World ranks, row-major over the axes.
    ranks: Vec<i32>,
}

impl Model {
    fn shape(&self) -> Vec<usize> {
        self.axes.iter().map(|(_, size)| *size).collect()
    }

    fn coordinate(&self, rank: i32) -> Vec<usize> {
        let mut index = self.ranks.iter().position(|known| *known == rank).expect("the rank is in the model");
        let mut coordinate: Vec<usize> = self
            .axes
            .iter()
            .rev()
            .map(|(_, size)| {
                let at = index % size;
                index /= size;
                at
            })
            .collect();
        coordinate.reverse();
        coordinate
    }

    fn at(&self, coordinate: &[usize]) -> i32 {
        let index = self.axes.iter().zip(coordinate).fold(0, |index, ((_, size), at)| index * size + at);
        self.ranks[index]
    }

    /// The copy of these axes, in this order, that holds `rank`.
    fn pick(&self, axes: &[usize], rank: i32) -> Model {
        let fixed = self.coordinate(rank);
        let picked: Vec<(String, usize)> = axes.iter().map(|axis| self.axes[*axis].clone()).collect();
        let size: usize = picked.iter().map(|(_, size)| size).product();
        let ranks = (0..size)
            .map(|mut index| {
                let mut coordinate = fixed.clone();
                for axis in axes.iter().rev() {
                    coordinate[*axis] = index % self.axes[*axis].1;
                    index /= self.axes[*axis].1;
                }
                self.at(&coordinate)
            })
            .collect();
        Model { axes: picked, ranks }
    }

    fn group(&self, axis: usize, rank: i32) -> Vec<i32> {
        self.pick(&[axis], rank).ranks
    }
}

#[derive(Debug, Clone)]
enum Step {
    Slice(Vec<prop::sample::Index>),
    Flatten,
    Unflatten(prop::sample::Index, usize),
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let index = any::<prop::sample::Index>;
    let step = prop_oneof![
        prop::collection::vec(index(), 1..4).prop_map(Step::Slice),
        Just(Step::Flatten),
        (index(), 1..6usize).prop_map(|(axis, factor)| Step::Unflatten(axis, factor)),
    ];
    prop::collection::vec(step, 0..6)
}

/// A shape, whether the ranks are shuffled and by what, a rank, and what to do.
fn cases() -> impl Strategy<Value = (Vec<usize>, Option<u64>, prop::sample::Index, Vec<Step>)> {
    (prop::collection::vec(1..5usize, 1..5), prop::option::of(any::<u64>()), any::<prop::sample::Index>(), steps())
}

fn shuffled(size: usize, seed: u64) -> Vec<i32> {
    let mut ranks: Vec<i32> = (0..size as i32).collect();
    let mut state = seed;
    for at in (1..size).rev() {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        ranks.swap(at, (state >> 33) as usize % (at + 1));
    }
    ranks
}

fn same(mesh: &Mesh, model: &Model, rank: i32) -> Result<(), TestCaseError> {
    prop_assert_eq!(mesh.shape(), model.shape());
    prop_assert_eq!(mesh.ranks(), model.ranks.clone());
    prop_assert_eq!(mesh.coordinate().unwrap(), model.coordinate(rank));
    for axis in 0..mesh.ndim() {
        prop_assert_eq!(mesh.group_ranks(axis).unwrap(), model.group(axis, rank));
        let place = model.group(axis, rank).iter().position(|known| *known == rank);
        prop_assert_eq!(Some(mesh.local_rank(axis).unwrap()), place, "local rank is the place in the group");
    }
    Ok(())
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 512, ..ProptestConfig::default() })]

    #[test]
    fn views_of_views_are_what_the_arrays_say((shape, seed, who, steps) in cases()) {
        let size: usize = shape.iter().product();
        let ranks = seed.map(|seed| shuffled(size, seed));
        let rank = who.index(size) as i32;
        let names: Vec<String> = (0..shape.len()).map(|axis| format!("d{axis}")).collect();
        let names: Vec<&str> = names.iter().map(String::as_str).collect();
        let spec = MeshSpec { device_type: "cpu", shape: &shape, names: Some(&names), ranks: ranks.as_deref(), world_size: size, rank: rank as usize };
        let mut mesh = Mesh::new(&spec).unwrap();
        let axes = names.iter().map(|name| (*name).to_owned()).zip(shape.iter().copied()).collect();
        let mut model = Model { axes, ranks: ranks.clone().unwrap_or_else(|| (0..size as i32).collect()) };
        same(&mesh, &model, rank)?;
        for (number, step) in steps.iter().enumerate() {
            match step {
                Step::Slice(picks) => {
                    let mut axes: Vec<usize> = Vec::new();
                    for pick in picks {
                        let axis = pick.index(model.axes.len());
                        if !axes.contains(&axis) {
                            axes.push(axis);
                        }
                    }
                    let names: Vec<&str> = axes.iter().map(|axis| model.axes[*axis].0.as_str()).collect();
                    mesh = mesh.slice(&names).unwrap();
                    model = model.pick(&axes, rank);
                }
                Step::Flatten => {
                    let name = format!("f{number}");
                    mesh = mesh.flatten(Some(&name)).unwrap();
                    mesh.publish().unwrap();
                    prop_assert!(mesh.is_known());
                    model.axes = vec![(name, model.ranks.len())];
                }
                Step::Unflatten(pick, factor) => {
                    let axis = pick.index(model.axes.len());
                    let (name, size) = model.axes[axis].clone();
                    let (outer, inner) = (format!("o{number}"), format!("i{number}"));
                    let sizes = [size / factor, *factor];
                    match mesh.unflatten(&name, &sizes, &[&outer, &inner]) {
                        Ok(split) => {
                            prop_assert_eq!(sizes[0] * sizes[1], size);
                            mesh = split;
                            model.axes.splice(axis..=axis, [(outer, sizes[0]), (inner, sizes[1])]);
                        }
                        // Sizes that do not multiply, or a boundary inside a step of a joined dimension.
                        Err(error) => prop_assert!(sizes[0] * sizes[1] != size || error.message().contains("do not fit"), "{}", error),
                    }
                }
            }
            same(&mesh, &model, rank)?;
        }
        // What split needs: one colour for each group of the whole world, keys in order.
        for axis in 0..mesh.ndim() {
            let group = mesh.group_ranks(axis).unwrap();
            let (color, key) = mesh.split_color_key(axis).unwrap();
            prop_assert_eq!(key as usize, mesh.local_rank(axis).unwrap());
            let groups = mesh.replica_groups(axis);
            let mut everybody = groups.clone();
            everybody.sort_unstable();
            prop_assert_eq!(everybody, (0..size as i64).collect::<Vec<_>>(), "each rank is in one group");
            let rows: Vec<&[i64]> = groups.chunks(mesh.dim_size(axis)).collect();
            let mine: Vec<i64> = group.iter().map(|rank| i64::from(*rank)).collect();
            prop_assert!(rows.contains(&&mine[..]), "mine is among them");
            for other in 0..size {
                let theirs = Mesh::new(&MeshSpec { rank: other, ..spec }).unwrap();
                // The same chain seen by another rank is only easy to repeat for a root.
                if steps.is_empty() {
                    let (their_color, _) = theirs.split_color_key(axis).unwrap();
                    prop_assert_eq!(their_color == color, group.contains(&(other as i32)), "equal colours exactly within a group");
                }
            }
        }
    }

    #[test]
    fn equal_meshes_hash_alike_however_they_were_made((shape, seed, who, _) in cases()) {
        let size: usize = shape.iter().product();
        let rank = who.index(size);
        let root = MeshSpec { device_type: "cpu", shape: &shape, names: None, ranks: None, world_size: size, rank };
        let mesh = Mesh::new(&root).unwrap();
        // One dimension of it, against a root that lists the same ranks.
        for axis in 0..shape.len() {
            let view = mesh.slice(&[mesh.dim_name(axis)]).unwrap();
            let listed = view.ranks();
            let names = [mesh.dim_name(axis)];
            let other = Mesh::new(&MeshSpec { shape: &[listed.len()], names: Some(&names), ranks: Some(&listed), ..root }).unwrap();
            prop_assert!(view.equals(&other) && other.equals(&view));
            prop_assert_eq!(view.hash(), other.hash());
        }
        // Another order of the ranks is another mesh.
        let ranks = shuffled(size, seed.unwrap_or(1));
        let permuted = Mesh::new(&MeshSpec { ranks: Some(&ranks), ..root }).unwrap();
        let identical = ranks.iter().enumerate().all(|(at, rank)| at as i32 == *rank);
        prop_assert_eq!(mesh.equals(&permuted), identical);
        prop_assert_eq!(mesh.hash() == permuted.hash(), identical);
    }

    #[test]
    fn submeshes_are_all_the_parallel_copies((shape, _, who, _) in cases(), picks in prop::collection::vec(any::<prop::sample::Index>(), 1..3)) {
        let size: usize = shape.iter().product();
        let rank = who.index(size);
        let mesh = Mesh::new(&MeshSpec { device_type: "cpu", shape: &shape, names: None, ranks: None, world_size: size, rank }).unwrap();
        let mut names: Vec<&str> = Vec::new();
        for pick in &picks {
            let name = mesh.dim_name(pick.index(shape.len()));
            if !names.contains(&name) {
                names.push(name);
            }
        }
        let count = mesh.submesh_count(&names).unwrap();
        let mut everybody = Vec::new();
        for index in 0..count {
            let copy = mesh.submesh(&names, index).unwrap();
            prop_assert_eq!(copy.is_member(), copy.ranks().contains(&(rank as i32)));
            if copy.is_member() {
                prop_assert!(copy.equals(&mesh.slice(&names).unwrap()));
            } else {
                prop_assert!(copy.coordinate().is_err());
            }
            everybody.extend(copy.ranks());
        }
        everybody.sort_unstable();
        prop_assert_eq!(everybody, (0..size as i32).collect::<Vec<_>>());
        prop_assert!(mesh.submesh(&names, count).is_err());
    }
}

#[test]
fn a_million_ranks_cost_no_more_than_eight() {
    let began = std::time::Instant::now();
    let spec = MeshSpec {
        device_type: "cuda",
        shape: &[64, 32, 64, 8],
        names: None,
        ranks: None,
        world_size: 1 << 20,
        rank: 777_777,
    };
    for _ in 0..100 {
        let mesh = Mesh::new(&spec).unwrap();
        let flat = mesh.slice(&["dim_3", "dim_1"]).unwrap().flatten(Some("flat")).unwrap();
        assert_eq!(flat.size(), 256);
        assert_ne!(flat.hash(), mesh.hash());
    }
    // Microseconds each; the bound is for a slow machine that does something else, and far below what listing the ranks would take.
    assert!(began.elapsed() < std::time::Duration::from_millis(500), "{:?}", began.elapsed());
}
