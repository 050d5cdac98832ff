//! Random chains of all mesh operations against explicit arrays (model/mod.rs). Mesh and model
//! give equal answers, and refuse for equal reasons. The mesh can do what the model can do.

mod model;

use devicemesh::error::Status;
use devicemesh::mesh::{Mesh, MeshSpec};
use model::{Root, View};
use proptest::prelude::*;
use proptest::sample::Index;

/// There are few names, so that they clash.
const NAMES: [&str; 7] = ["d0", "d1", "f", "g", "u", "v", ""];

/// Returns the name of one of the view's dimensions, or any name.
#[derive(Debug, Clone)]
enum Name {
    Own(Index),
    Any(Index),
}

/// An operation on the views that exist.
#[derive(Debug, Clone)]
enum Step {
    Slice(Index, Vec<Name>),
    Flatten(Index, Option<Index>),
    /// The first size is what the other sizes leave, where they fit.
    Unflatten(Index, Name, Vec<usize>, Vec<Index>),
    Concatenate(Vec<Index>),
    /// The ranks of a view get another shape.
    Reshape(Index, Vec<usize>, Vec<Index>),
    /// The dimension, the start, the length and the step.
    Range(Index, Name, usize, usize, usize),
    Submesh(Index, Vec<Name>, Index),
    Root,
}

fn names() -> impl Strategy<Value = Vec<Name>> {
    let name = prop_oneof![3 => any::<Index>().prop_map(Name::Own), 1 => any::<Index>().prop_map(Name::Any)];
    prop::collection::vec(name, 0..4)
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let index = any::<Index>;
    let sizes = || (prop::collection::vec(1..5usize, 0..3), prop::collection::vec(index(), 3));
    let step = prop_oneof![
        3 => (index(), names()).prop_map(|(view, names)| Step::Slice(view, names)),
        3 => (index(), prop::option::of(index())).prop_map(|(view, name)| Step::Flatten(view, name)),
        3 => (index(), index(), sizes()).prop_map(|(view, dim, (sizes, names))| Step::Unflatten(view, Name::Own(dim), sizes, names)),
        3 => (index(), sizes()).prop_map(|(view, (sizes, names))| Step::Reshape(view, sizes, names)),
        2 => (index(), index(), 0..3usize, 0..4usize, 0..3usize)
            .prop_map(|(view, dim, start, len, step)| Step::Range(view, Name::Own(dim), start, len, step)),
        4 => prop::collection::vec(index(), 0..4).prop_map(Step::Concatenate),
        2 => (index(), names(), index()).prop_map(|(view, names, copy)| Step::Submesh(view, names, copy)),
        1 => Just(Step::Root),
    ];
    prop::collection::vec(step, 0..10)
}

/// Returns a shape, whether and by what the ranks are shuffled, a rank, and the number of ranks of
/// the world beside the mesh.
fn cases() -> impl Strategy<Value = (Vec<usize>, Option<u64>, Index, usize)> {
    let shape = prop::collection::vec(prop_oneof![4 => 1..5usize, 1 => Just(6)], 1..5);
    let shape = shape.prop_filter("small enough to write out", |shape| shape.iter().product::<usize>() <= 64);
    (shape, prop::option::of(any::<u64>()), any::<Index>(), prop_oneof![2 => Just(0), 1 => 1..4usize])
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

/// Checks that every question to a view has the model's answer.
fn same(mesh: &Mesh, view: &View, root: &Root, world_size: usize) -> Result<(), TestCaseError> {
    let ranks = root.ranks_of(&view.positions);
    prop_assert_eq!(mesh.shape(), view.shape());
    prop_assert_eq!(mesh.dim_names(), view.names());
    prop_assert_eq!(mesh.ranks(), ranks.clone());
    prop_assert_eq!(mesh.size(), ranks.len());
    prop_assert_eq!(mesh.describe(), root.describe(view));
    prop_assert_eq!(mesh.is_member(), root.is_member(view), "{:?} of {}", ranks, mesh.describe());
    for rank in -1..=world_size as i32 {
        let expected = ranks.iter().position(|known| *known == rank).map(|index| view.coordinate(index));
        prop_assert_eq!(mesh.coordinate_of(rank).ok(), expected, "rank {} of {}", rank, mesh.describe());
    }
    let mine = root.position.filter(|_| root.is_member(view));
    for (index, axis) in view.axes.iter().enumerate() {
        let groups: Vec<i32> = axis.groups.iter().flat_map(|group| root.ranks_of(group)).collect();
        prop_assert_eq!(mesh.replica_groups(index), groups);
        let group = mine.map(|position| root.ranks_of(axis.group(position)));
        let place = mine.map(|position| axis.coordinate(position));
        prop_assert_eq!(mesh.group_ranks(index).ok(), group.clone());
        prop_assert_eq!(mesh.local_rank(index).ok(), place, "local rank is the place in the group");
        // Each group of the whole root has a colour and keys in order, by which communicators are
        // split.
        let split = mine.map(|position| (axis.group(position)[0] as i32, axis.coordinate(position) as i32));
        prop_assert_eq!(mesh.split_color_key(index).ok(), split);
        for step in -9..=9i64 {
            let there = group.as_ref().and_then(|group| group.get(usize::try_from(step).ok()?).copied());
            let translated = usize::try_from(step).ok().and_then(|step| mesh.translate_rank(index, step).ok());
            prop_assert_eq!(translated, there);
            let (Some(group), Some(place)) = (&group, place) else {
                prop_assert!(mesh.neighbor(index, step, true).is_err() && mesh.neighbor(index, step, false).is_err());
                continue;
            };
            let along = place as i64 + step;
            let past = usize::try_from(along).ok().and_then(|along| group.get(along).copied());
            prop_assert_eq!(mesh.neighbor(index, step, false).unwrap().map(|at| group[at]), past);
            let around = group[along.rem_euclid(group.len() as i64) as usize];
            prop_assert_eq!(mesh.neighbor(index, step, true).unwrap().map(|at| group[at]), Some(around));
            prop_assert_eq!(mesh.dim_rank(index, around).unwrap(), along.rem_euclid(group.len() as i64) as usize);
        }
    }
    prop_assert_eq!(
        mesh.coordinate().ok(),
        mine.map(|position| view.axes.iter().map(|axis| axis.coordinate(position)).collect())
    );
    Ok(())
}

/// Checks that the outcome of an operation is the model's: the view, or the status of the refusal.
fn agree(
    what: &str,
    mesh: devicemesh::error::Result<Mesh>,
    view: Result<View, model::Refused>,
) -> Result<Option<(Mesh, View)>, TestCaseError> {
    match (mesh, view) {
        (Ok(mesh), Ok(view)) => Ok(Some((mesh, view))),
        (Err(error), Err(status)) => {
            prop_assert_eq!(error.status(), status, "{}: {}", what, error);
            prop_assert!(!error.message().contains('\n') && !error.message().is_empty());
            Ok(None)
        }
        (Ok(mesh), Err(status)) => Err(TestCaseError::fail(format!("{what} gives {mesh}, expected {status:?}"))),
        (Err(error), Ok(view)) => {
            Err(TestCaseError::fail(format!("{what} is refused ({error}), expected {:?}", view.positions)))
        }
    }
}

/// Returns the sizes behind a first one, with which their product is `whole`, where they divide
/// `whole`.
fn filled(inner: &[usize], whole: usize) -> Vec<usize> {
    let first = whole / inner.iter().product::<usize>();
    [&[first], inner].concat()
}

fn resolve<'a>(name: &Name, view: &'a View) -> &'a str {
    match name {
        Name::Own(index) if !view.axes.is_empty() => &view.axes[index.index(view.axes.len())].name,
        Name::Own(index) | Name::Any(index) => NAMES[index.index(NAMES.len())],
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 512, ..ProptestConfig::default() })]

    #[test]
    fn operations_in_any_order_are_what_the_arrays_say((shape, seed, who, others) in cases(), steps in steps()) {
        let size: usize = shape.iter().product();
        let world_size = size + others;
        // The mesh has a part of the world's ranks, in any order.
        let ranks = seed.map(|seed| shuffled(world_size, seed)[..size].to_vec());
        let rank = who.index(world_size) as i32;
        let names: Vec<String> = (0..shape.len()).map(|axis| format!("d{axis}")).collect();
        let names: Vec<&str> = names.iter().map(String::as_str).collect();
        let mut spec = MeshSpec::new("cpu", &shape, world_size, rank as usize).names(&names);
        spec.ranks = ranks.as_deref();
        let mesh = Mesh::new(&spec).unwrap();
        let root = Root::new(&shape, &names, ranks.clone().unwrap_or_else(|| (0..size as i32).collect()), rank);
        let mut views = vec![(mesh, root.view(), 0)];
        // The roots, each with the root of which it is a range.
        let mut roots = vec![(root, 0)];
        // There are views to put side by side from the start.
        for name in &names {
            let sliced = agree("slice", views[0].0.slice(&[name]), roots[0].0.slice(&views[0].1, &[name]))?;
            views.extend(sliced.map(|(mesh, view)| (mesh, view, 0)));
        }
        for step in &steps {
            let at = |index: &Index| &views[index.index(views.len())];
            let called = |picks: &[Index]| picks.iter().map(|index| NAMES[index.index(NAMES.len())]).collect::<Vec<_>>();
            let made = match step {
                Step::Slice(view, picks) => {
                    let (mesh, view, of) = at(view);
                    let names: Vec<&str> = picks.iter().map(|name| resolve(name, view)).collect();
                    let expected = roots[*of].0.slice(view, &names);
                    agree(&format!("slice {names:?} of {mesh}"), mesh.slice(&names), expected)?.map(|made| (made, *of))
                }
                Step::Flatten(view, name) => {
                    let (mesh, view, of) = at(view);
                    let name = name.map(|index| NAMES[index.index(NAMES.len())]);
                    let flat = mesh.flatten(name);
                    let flat = flat.and_then(|flat| if flat.equals(mesh) { Ok(flat) } else { flat.publish().map(|()| flat) });
                    let expected = roots[*of].0.flatten(view, name);
                    agree(&format!("flatten {mesh} as {name:?}"), flat, expected)?.map(|made| (made, *of))
                }
                Step::Unflatten(view, dim, inner, names) => {
                    let (mesh, view, of) = at(view);
                    let dim = resolve(dim, view);
                    let whole = view.axes.iter().find(|axis| axis.name == dim).map_or(0, |axis| axis.size());
                    let (sizes, names) = (filled(inner, whole), called(&names[..=inner.len()]));
                    let expected = roots[*of].0.unflatten(view, dim, &sizes, &names);
                    let what = format!("unflatten {dim} of {mesh} into {sizes:?}, {names:?}");
                    agree(&what, mesh.unflatten(dim, &sizes, &names), expected)?.map(|made| (made, *of))
                }
                Step::Reshape(view, inner, names) => {
                    let (mesh, view, of) = at(view);
                    let (sizes, names) = (filled(inner, view.positions.len()), called(&names[..=inner.len()]));
                    let expected = roots[*of].0.reshape(view, &sizes, &names);
                    let what = format!("reshape {mesh} to {sizes:?}, {names:?}");
                    let other = mesh.reshape(&sizes, &names).inspect(Mesh::keep_names);
                    agree(&what, other, expected)?.map(|made| (made, *of))
                }
                Step::Range(view, dim, start, len, step) => {
                    let (mesh, view, of) = at(view);
                    let dim = resolve(dim, view);
                    let what = format!("{len} indices of {dim} from {start} in steps of {step} of {mesh}");
                    let cut = mesh.slice_range(dim, *start, *len, *step);
                    match roots[*of].0.range(view, dim, *start, *len, *step) {
                        Err(status) => agree(&what, cut, Err(status))?.map(|made| (made, *of)),
                        Ok(None) => agree(&what, cut, Ok(view.clone()))?.map(|made| (made, *of)),
                        Ok(Some((root, view))) => {
                            let from = *of;
                            roots.push((root, from));
                            agree(&what, cut, Ok(view))?.map(|made| (made, roots.len() - 1))
                        }
                    }
                }
                Step::Concatenate(picks) => {
                    let picked: Vec<_> = picks.iter().map(at).collect();
                    let meshes: Vec<&Mesh> = picked.iter().map(|(mesh, ..)| mesh).collect();
                    let parts: Vec<&View> = picked.iter().map(|(_, view, _)| view).collect();
                    let of = picked.first().map_or(0, |(.., of)| *of);
                    let what = meshes.iter().map(|mesh| mesh.describe()).collect::<Vec<_>>().join(", ");
                    let expected = match picked.iter().all(|(.., other)| *other == of) {
                        true => roots[of].0.concatenate(&parts),
                        false => Err(Status::InvalidArgument),
                    };
                    agree(&format!("concatenate {what}"), Mesh::concatenate(&meshes), expected)?.map(|made| (made, of))
                }
                Step::Submesh(view, picks, copy) => {
                    let (mesh, view, of) = at(view);
                    let names: Vec<&str> = picks.iter().map(|name| resolve(name, view)).collect();
                    let copies = roots[*of].0.submeshes(view, &names);
                    let count = mesh.submesh_count(&names);
                    prop_assert_eq!(count.clone().ok(), copies.as_ref().map(Vec::len).ok());
                    let index = copy.index(copies.as_ref().map_or(1, Vec::len));
                    if let Ok(count) = count {
                        prop_assert!(mesh.submesh(&names, count).is_err());
                    }
                    let expected = copies.map(|copies| copies[index].clone());
                    let what = format!("submesh {index} over {names:?} of {mesh}");
                    agree(&what, mesh.submesh(&names, index), expected)?.map(|made| (made, *of))
                }
                Step::Root => Some(((at(&who).0.root(), roots[0].0.view()), 0)),
            };
            for at in 1..roots.len() {
                let outer = roots[roots[at].1].0.clone();
                roots[at].0.inherit(&outer);
            }
            if let Some(((mesh, view), of)) = made {
                same(&mesh, &view, &roots[of].0, world_size)?;
                views.push((mesh, view, of));
            }
        }
        // Every view that holds a flattened dimension knows it by name, and no other view does.
        for (mesh, view, of) in &views {
            let root = &roots[*of].0;
            for name in NAMES {
                let own = view.axes.iter().find(|axis| axis.name == name).cloned();
                // A flattened dimension is a view of its own. A rank outside the view has none.
                let axis = own.map_or_else(|| root.slice(view, &[name]).map(|slice| slice.axes[0].clone()), Ok);
                let found = mesh.along(Some(name));
                prop_assert_eq!(found.is_ok(), axis.is_ok(), "{} along {}: {:?}", mesh, name, found.err());
                if let (Ok((found, index)), Ok(axis)) = (found, axis) {
                    let mine = root.position.filter(|_| root.is_member(view));
                    prop_assert_eq!(found.group_ranks(index).ok(), mine.map(|position| root.ranks_of(axis.group(position))));
                    prop_assert_eq!(found.dim_size(index), axis.size());
                }
            }
        }
        // Views are compared by value: they are equal exactly when names, sizes and ranks are,
        // however the views were made. So is a view and a root that lists the ranks.
        for (mesh, view, of) in &views {
            let (ranks, shape, names) = (roots[*of].0.ranks_of(&view.positions), view.shape(), view.names());
            let listed = MeshSpec::new(spec.device_type, &shape, spec.world_size, spec.rank).names(&names).ranks(&ranks);
            let listed = Mesh::new(&listed).unwrap();
            prop_assert!(mesh.equals(&listed) && listed.equals(mesh), "{} and {}", mesh, listed);
            prop_assert_eq!(mesh.hash(), listed.hash());
            for (other, theirs, from) in &views {
                let equal = names == theirs.names() && shape == theirs.shape() && ranks == roots[*from].0.ranks_of(&theirs.positions);
                prop_assert_eq!(mesh.equals(other), equal, "{} and {}", mesh, other);
                prop_assert_eq!(mesh.hash() == other.hash(), equal, "{} and {}", mesh, other);
            }
        }
    }

    #[test]
    fn equal_meshes_hash_alike_however_they_were_made((shape, seed, who, _) in cases()) {
        let size: usize = shape.iter().product();
        let rank = who.index(size);
        let root = MeshSpec::new("cpu", &shape, size, rank);
        let mesh = Mesh::new(&root).unwrap();
        // One dimension of the view is compared with a root that lists its ranks.
        for axis in 0..shape.len() {
            let view = mesh.slice(&[mesh.dim_name(axis)]).unwrap();
            let listed = view.ranks();
            let names = [mesh.dim_name(axis)];
            let line = [listed.len()];
            let other = MeshSpec::new(root.device_type, &line, root.world_size, root.rank).names(&names).ranks(&listed);
            let other = Mesh::new(&other).unwrap();
            prop_assert!(view.equals(&other) && other.equals(&view));
            prop_assert_eq!(view.hash(), other.hash());
        }
        // Another order of the ranks makes another mesh.
        let ranks = shuffled(size, seed.unwrap_or(1));
        let permuted = Mesh::new(&root.ranks(&ranks)).unwrap();
        let identical = ranks.iter().enumerate().all(|(at, rank)| at as i32 == *rank);
        prop_assert_eq!(mesh.equals(&permuted), identical);
        prop_assert_eq!(mesh.hash() == permuted.hash(), identical);
    }

    #[test]
    fn submeshes_are_all_the_parallel_copies(
        (shape, _, who, _) in cases(),
        picks in prop::collection::vec(any::<prop::sample::Index>(), 1..3),
    ) {
        let size: usize = shape.iter().product();
        let rank = who.index(size);
        let mesh = Mesh::new(&MeshSpec::new("cpu", &shape, size, rank)).unwrap();
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

/// Returns for how long this thread has had a processor. Other work of the machine does not count.
fn thread_time() -> std::time::Duration {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: a clock that every Linux has, and a place for its time.
    assert_eq!(unsafe { libc::clock_gettime(libc::CLOCK_THREAD_CPUTIME_ID, &mut time) }, 0);
    std::time::Duration::new(time.tv_sec as u64, time.tv_nsec as u32)
}

#[test]
fn a_million_ranks_cost_no_more_than_eight() {
    let began = thread_time();
    let spec = MeshSpec::new("cuda", &[64, 32, 64, 8], 1 << 20, 777_777);
    for _ in 0..100 {
        let mesh = Mesh::new(&spec).unwrap();
        let flat = mesh.slice(&["dim_3", "dim_1"]).unwrap().flatten(Some("flat")).unwrap();
        assert_eq!(flat.size(), 256);
        assert_ne!(flat.hash(), mesh.hash());
    }
    // Each call takes microseconds. The bound is for a slow machine. It is far below the time that
    // listing the ranks would take.
    let took = thread_time() - began;
    assert!(took < std::time::Duration::from_millis(500), "{took:?}");
}
