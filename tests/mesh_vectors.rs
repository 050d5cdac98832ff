//! Replays what real PyTorch (2.15, fake backend) answered. Every success and every refusal of
//! PyTorch must be one here, too. The exceptions are on purpose, and each of them is a rule here
//! with its reason.

mod vectors;

use std::collections::{BTreeMap, HashMap};
use std::path::{Path, PathBuf};

use devicemesh::mesh::{Mesh, MeshSpec};
use devicemesh::ndarray::{ArrayD, ArrayViewD};
use serde_json::Value;
use vectors::{array_shape, dim_name, flatten_numbers, nested, numbers, short};

/// The reason why this library answers otherwise than PyTorch in a case; tests/mesh_differences.rs
/// has a test for each.
const DIMS_ALWAYS_HAVE_NAMES: &str = "a mesh without names has dim_0, dim_1 ..., so it can be sliced and flattened";
const SLICES_IN_ANY_ORDER: &str = "slices take names in any order";
const FLAT_NAMES_FROM_ANY_VIEW: &str = "flattened names are known to every view that holds their dimensions";
const RANKS_KEEP_THEIR_ORDER: &str = "groups of permuted meshes keep coordinate order; PyTorch sorts them";
const NO_REPEATED_RANKS: &str = "a rank that is listed twice is refused";
const NO_REPEATED_NAMES: &str = "slice, unflatten and concatenate refuse repeated names";
const NO_RANKS_OUTSIDE: &str = "a rank outside the world is refused also where PyTorch makes no group of it";

struct Replay {
    meshes: HashMap<String, Mesh>,
    named: bool,
    permuted: bool,
    /// The names that flatten gave.
    flattened: Vec<String>,
    /// The names that would exist if one of the rules had not refused an earlier operation.
    unmade: Vec<String>,
    agreed: usize,
    skipped: usize,
    differences: BTreeMap<&'static str, usize>,
    failures: Vec<String>,
}

#[test]
fn every_answer_is_pytorchs_or_a_listed_difference() {
    const OWN_CASES: usize = 437;
    let own = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/vectors/torch_device_mesh.jsonl");
    let mut files: Vec<PathBuf> = vec![own];
    let shared = Path::new(env!("CARGO_MANIFEST_DIR")).join("../shared/vectors");
    let more = std::fs::read_dir(shared).into_iter().flatten().flatten().map(|entry| entry.path());
    files.extend(more.filter(|path| path.extension().is_some_and(|extension| extension == "jsonl")));
    for file in files {
        let text = std::fs::read_to_string(&file).unwrap();
        let is_own = file.starts_with(Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/vectors"));
        assert!(!is_own || text.lines().count() == OWN_CASES, "the project's own copy is whole");
        let (mut agreed, mut skipped, mut cases) = (0, 0, 0);
        let mut differences: BTreeMap<&str, usize> = BTreeMap::new();
        let mut failures = Vec::new();
        for line in text.lines() {
            let case: Value = serde_json::from_str(line).unwrap();
            let replay = replay(&case);
            cases += 1;
            agreed += replay.agreed;
            skipped += replay.skipped;
            for (why, count) in replay.differences {
                *differences.entry(why).or_default() += count;
            }
            failures.extend(replay.failures);
        }
        println!("{}: {cases} cases, {agreed} answers agree, {skipped} are not of this layer", file.display());
        for (why, count) in &differences {
            println!("  {count} differ: {why}");
        }
        assert!(
            failures.is_empty(),
            "{} answers differ; the first:\n{}",
            failures.len(),
            failures[..failures.len().min(12)].join("\n")
        );
        assert!(agreed > cases && cases > 0, "the file was replayed");
        assert!(!is_own || differences.len() == 7, "a rule that no case needs is gone: {differences:?}");
    }
}

fn replay(case: &Value) -> Replay {
    let ctor = &case["ctor"];
    let flat_ranks = flatten_numbers(&ctor["ranks"]);
    let shape: Vec<usize> = match ctor["kind"].as_str() {
        Some("array") => array_shape(&ctor["ranks"]),
        _ => numbers(&ctor["shape"]),
    };
    let names =
        ctor["names"].as_array().map(|names| names.iter().map(|name| name.as_str().unwrap()).collect::<Vec<_>>());
    let number = |name: &str| case[name].as_u64().unwrap() as usize;
    let mut spec =
        MeshSpec::new(ctor["device_type"].as_str().unwrap_or("cpu"), &shape, number("world"), number("rank"));
    spec.names = names.as_deref();
    spec.ranks = (ctor["kind"] == "array").then_some(&flat_ranks[..]);
    let mut replay = Replay {
        meshes: HashMap::new(),
        named: names.is_some(),
        permuted: !flat_ranks.windows(2).all(|two| two[0] < two[1]),
        flattened: Vec::new(),
        unmade: Vec::new(),
        agreed: 0,
        skipped: 0,
        differences: BTreeMap::new(),
        failures: Vec::new(),
    };
    let label = format!("case {} root", case["case"]);
    let made = match spec.ranks {
        // The case has the array as PyTorch's constructor takes it.
        Some(_) => from_array(&spec, &flat_ranks),
        None => Mesh::new(&spec),
    };
    match (made, case["root"].get("ok")) {
        (Ok(mesh), Some(expected)) => {
            replay.compare_view(&label, &mesh, expected);
            replay.meshes.insert("root".to_owned(), mesh);
        }
        (Err(_), None) => replay.agreed += 1,
        (Err(error), Some(_)) if error.message().contains("listed twice") => replay.differ(NO_REPEATED_RANKS),
        (Err(error), Some(_)) if error.message().contains("is out of range") => replay.differ(NO_RANKS_OUTSIDE),
        (ours, theirs) => replay.failures.push(format!("{label}: ours {ours:?}, PyTorch {theirs:?}")),
    }
    for (index, op) in case["ops"].as_array().unwrap().iter().enumerate() {
        replay.operate(&format!("case {} op {index} {}", case["case"], short(op)), op);
    }
    replay
}

/// Returns the mesh of the case's array. It must be the mesh of its shape and ranks, also when the
/// array lies in memory the other way round.
fn from_array(spec: &MeshSpec<'_>, ranks: &[i32]) -> devicemesh::error::Result<Mesh> {
    let from = |array: ArrayViewD<'_, i32>| {
        Mesh::from_rank_array(spec.device_type, array, spec.names, spec.world_size, spec.rank)
    };
    let row_major = ArrayD::from_shape_vec(spec.shape, ranks.to_vec()).unwrap();
    let column_major = row_major.t().as_standard_layout().into_owned();
    let (mesh, listed) = (from(row_major.view()), Mesh::new(spec));
    for other in [listed, from(column_major.t())] {
        match (&mesh, &other) {
            (Ok(mesh), Ok(other)) => assert!(mesh.equals(other), "{} and {}", mesh.describe(), other.describe()),
            (mesh, other) => assert_eq!(mesh.as_ref().err(), other.as_ref().err()),
        }
    }
    if let Ok(mesh) = &mesh {
        assert_eq!(mesh.rank_array(), row_major);
    }
    mesh
}

impl Replay {
    fn operate(&mut self, label: &str, op: &Value) {
        let Some(mesh) = self.meshes.get(op["on"].as_str().unwrap()).cloned() else {
            self.skipped += 1;
            self.unmade.extend(op["name"].as_str().map(str::to_owned));
            return;
        };
        let made = match op["op"].as_str().unwrap() {
            "slice" => {
                let names: Vec<&str> =
                    op["names"].as_array().unwrap().iter().map(|name| name.as_str().unwrap()).collect();
                Some(mesh.slice(&names))
            }
            "flatten" => Some(
                mesh.flatten(op["name"].as_str())
                    .and_then(|flat| if flat.ndim() == 1 { flat.publish_once().map(|()| flat) } else { Ok(flat) }),
            ),
            "unflatten" => {
                let names: Vec<&str> =
                    op["names"].as_array().unwrap().iter().map(|name| name.as_str().unwrap()).collect();
                let Some(dim) = dim_name(&mesh, &op["dim"]) else {
                    return self.refused(label, op);
                };
                Some(mesh.unflatten(&dim, &numbers(&op["sizes"]), &names))
            }
            "concatenate" => {
                let others: Option<Vec<Mesh>> = op["others"]
                    .as_array()
                    .unwrap()
                    .iter()
                    .map(|id| self.meshes.get(id.as_str().unwrap()).cloned())
                    .collect();
                let Some(others) = others else {
                    self.skipped += 1;
                    return;
                };
                let all: Vec<&Mesh> = std::iter::once(&mesh).chain(&others).collect();
                Some(Mesh::concatenate(&all))
            }
            "get_local_rank" | "get_group" => return self.ask(label, &mesh, op),
            "all_submeshes" => return self.submeshes(label, &mesh, op),
            "eq" => {
                let Some(other) = self.meshes.get(op["other"].as_str().unwrap()) else {
                    self.skipped += 1;
                    return;
                };
                let theirs = op["result"]["ok"][0].as_bool();
                let ours = mesh.equals(other);
                assert!(!ours || mesh.hash() == other.hash(), "{label}: equal meshes have equal hashes");
                return self.check(label, Some(ours) == theirs, &format!("equal {ours}"), op);
            }
            _ => None,
        };
        match made {
            None => self.skipped += 1,
            Some(made) => self.compare(label, made, op),
        }
    }

    fn compare(&mut self, label: &str, made: devicemesh::error::Result<Mesh>, op: &Value) {
        match (made, op["result"].get("ok")) {
            (Ok(mesh), Some(expected)) => {
                self.compare_view(label, &mesh, expected);
                if op["op"] == "flatten" {
                    self.flattened.push(mesh.dim_name(0).to_owned());
                }
                if let Some(id) = op["id"].as_str() {
                    self.meshes.insert(id.to_owned(), mesh);
                }
            }
            (Err(_), None) => self.agreed += 1,
            (Err(error), Some(_)) if error.message().contains("is repeated in") => self.differ(NO_REPEATED_NAMES),
            (Ok(_), None) => {
                let message = op["result"]["msg"].as_str().unwrap_or_default();
                if !self.named {
                    self.differ(DIMS_ALWAYS_HAVE_NAMES);
                } else if message.contains("should be in ascending order") {
                    self.differ(SLICES_IN_ANY_ORDER);
                } else if message.contains("Valid mesh_dim_names are") && self.asks_flattened(op) {
                    self.differ(FLAT_NAMES_FROM_ANY_VIEW);
                } else {
                    self.failures.push(format!("{label}: ours succeeds, PyTorch refuses: {message}"));
                }
            }
            (Err(error), Some(_))
                if self.unmade.iter().any(|name| error.message().contains(&format!("dimension {name} does"))) =>
            {
                self.differ(NO_REPEATED_NAMES);
            }
            (Err(error), Some(expected)) => {
                self.failures.push(format!("{label}: ours refuses ({error}), PyTorch gives {}", expected["repr"]));
            }
        }
    }

    fn compare_view(&mut self, label: &str, mesh: &Mesh, expected: &Value) {
        let shape: Vec<usize> = numbers(&expected["shape"]);
        let mut wrong = Vec::new();
        let mut expect = |what: &str, same: bool, ours: String| {
            if !same {
                wrong.push(format!("{what}: ours {ours}, PyTorch {}", expected[what]));
            }
        };
        expect("shape", mesh.shape() == shape, format!("{:?}", mesh.shape()));
        if !expected["mesh"].is_null() {
            expect("mesh", mesh.ranks() == flatten_numbers(&expected["mesh"]), format!("{:?}", mesh.ranks()));
            let array = mesh.rank_array();
            expect("mesh as an array", nested(array.view()) == expected["mesh"], format!("{array:?}"));
        }
        expect("repr", Some(mesh.describe().as_str()) == expected["repr"].as_str(), mesh.describe());
        let coordinate = mesh.coordinate().ok();
        let theirs = expected["coordinate"].as_array().map(|_| numbers::<usize>(&expected["coordinate"]));
        expect("coordinate", coordinate == theirs, format!("{coordinate:?}"));
        if let Some(groups) = expected["groups"].as_array().filter(|_| mesh.is_member()) {
            let ours: Vec<Vec<i32>> = (0..mesh.ndim()).map(|index| mesh.group_ranks(index).unwrap()).collect();
            let theirs: Vec<Vec<i32>> = groups.iter().map(flatten_numbers).collect();
            let sorted = |groups: &[Vec<i32>]| {
                groups
                    .iter()
                    .map(|group| {
                        let mut group = group.clone();
                        group.sort_unstable();
                        group
                    })
                    .collect::<Vec<_>>()
            };
            if ours != theirs && sorted(&ours) == sorted(&theirs) && self.permuted_view(mesh) {
                *self.differences.entry(RANKS_KEEP_THEIR_ORDER).or_default() += 1;
            } else {
                expect("groups", ours == theirs, format!("{ours:?}"));
                let local: Vec<usize> = (0..mesh.ndim()).map(|index| mesh.local_rank(index).unwrap()).collect();
                let theirs = numbers::<usize>(&expected["local_ranks"]);
                expect("local_ranks", local == theirs, format!("{local:?}"));
            }
        }
        if wrong.is_empty() {
            self.agreed += 1;
        } else {
            self.failures.push(format!("{label}: {}", wrong.join("; ")));
        }
    }

    /// Whether some group of the view is not in the order of its ranks.
    fn permuted_view(&self, mesh: &Mesh) -> bool {
        self.permuted || (0..mesh.ndim()).any(|index| !mesh.group_ranks(index).unwrap().is_sorted())
    }

    fn ask(&mut self, label: &str, mesh: &Mesh, op: &Value) {
        let index = match &op["dim"] {
            Value::Null => mesh.dim_index_or_only(None),
            Value::String(name) => match mesh.dim_index(name) {
                // PyTorch takes the root's flattened names here. Those of this library are slices
                // of the view.
                Err(_) => {
                    let slice = mesh.slice(&[name]);
                    return match (slice, op["result"].get("ok")) {
                        (Ok(slice), Some(_)) => self.answer(label, &slice, 0, op),
                        (Ok(_), None) if !mesh.is_member() => self.agreed += 1,
                        (Ok(_), None) if self.flattened.contains(name) => self.differ(FLAT_NAMES_FROM_ANY_VIEW),
                        (Err(_), None) => self.agreed += 1,
                        // PyTorch answers with the root's flattened dimension, though this view
                        // does not hold it.
                        (Err(_), Some(_)) if self.flattened.contains(name) => self.differ(FLAT_NAMES_FROM_ANY_VIEW),
                        (ours, _) => self.check(label, false, &format!("{ours:?}"), op),
                    };
                }
                found => found,
            },
            index => match dim_name(mesh, index) {
                Some(name) => mesh.dim_index(&name),
                None => return self.refused(label, op),
            },
        };
        match index {
            Ok(index) => self.answer(label, mesh, index, op),
            Err(error) => self.check(label, op["result"].get("ok").is_none(), &error.to_string(), op),
        }
    }

    fn answer(&mut self, label: &str, mesh: &Mesh, index: usize, op: &Value) {
        let expected = op["result"].get("ok");
        if op["op"] == "get_local_rank" {
            let ours = mesh.local_rank(index).ok();
            let theirs = expected.and_then(Value::as_u64).map(|rank| rank as usize);
            if ours != theirs && ours.is_some() && theirs.is_some() && self.permuted_view(mesh) {
                return self.differ(RANKS_KEEP_THEIR_ORDER);
            }
            return self.check(label, ours == theirs, &format!("{ours:?}"), op);
        }
        let ours = mesh.group_ranks(index).ok();
        let theirs = expected.map(flatten_numbers);
        if ours != theirs && ours.is_some() && theirs.is_some() && self.permuted_view(mesh) {
            let sorted = ours.clone().map(|mut group| {
                group.sort_unstable();
                group
            });
            if sorted
                == theirs.clone().map(|mut group| {
                    group.sort_unstable();
                    group
                })
            {
                return self.differ(RANKS_KEEP_THEIR_ORDER);
            }
        }
        self.check(label, ours == theirs, &format!("{ours:?}"), op);
    }

    /// Whether an operation names a dimension that flatten made.
    fn asks_flattened(&self, op: &Value) -> bool {
        let names = op["names"].as_array().map(Vec::as_slice).unwrap_or_default();
        names.iter().any(|name| self.flattened.iter().any(|known| name == known))
    }

    fn submeshes(&mut self, label: &str, mesh: &Mesh, op: &Value) {
        let name = op["name"].as_str().unwrap();
        let ours = mesh.submesh_count(&[name]).and_then(|count| {
            (0..count)
                .map(|index| Ok(mesh.submesh(&[name], index)?.ranks()))
                .collect::<devicemesh::error::Result<Vec<_>>>()
        });
        match (ours, op["result"]["ok"].as_array()) {
            (Ok(ours), Some(theirs)) => {
                let theirs: Vec<Vec<i32>> = theirs.iter().map(flatten_numbers).collect();
                self.check(label, ours == theirs, &format!("{ours:?}"), op);
            }
            (Err(_), None) => self.agreed += 1,
            (Ok(_), None) if !self.named => self.differ(DIMS_ALWAYS_HAVE_NAMES),
            (ours, _) => self.check(label, false, &format!("{ours:?}"), op),
        }
    }

    fn refused(&mut self, label: &str, op: &Value) {
        self.check(label, op["result"].get("ok").is_none(), "no such dimension", op);
    }

    fn check(&mut self, label: &str, same: bool, ours: &str, op: &Value) {
        if same {
            self.agreed += 1;
        } else {
            self.failures.push(format!("{label}: ours {ours}, PyTorch {}", op["result"]));
        }
    }

    fn differ(&mut self, why: &'static str) {
        *self.differences.entry(why).or_default() += 1;
    }
}

/// Publishes as `dm_flatten` does. A dimension that is flattened under its own name has nothing to
/// publish.
trait PublishOnce {
    fn publish_once(&self) -> devicemesh::error::Result<()>;
}

impl PublishOnce for Mesh {
    fn publish_once(&self) -> devicemesh::error::Result<()> {
        if self.is_known() { Ok(()) } else { self.publish() }
    }
}
