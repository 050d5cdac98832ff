//! A mesh as one line of JSON, from which another process, run or language can make it again.
//!
//! ```json
//! {"devicemesh":1,"device_type":"cuda","shape":[2,4],"names":["dp","tp"],"layout":[[[2,4]],[[4,1]]],"base":0,"ranks":[[0,8]]}
//! ```
//!
//! `ranks` is a list of world ranks in runs, `[first, count]` or `[first, count, step]`. Each
//! dimension has (size, stride) pairs, the most significant first. A coordinate is a mixed-radix
//! number over these pairs, and the rank at it is the one at position `base` plus what the pairs
//! add. A view of a root without a rank array is written as its layout over the root's ranks, which
//! takes O(dimensions) for any number of ranks. Any other mesh, and a range, is written as its own
//! ranks in order.
//!
//! Anybody may have written a text. So nothing in it is believed before it was checked, and no rank
//! list is made before the mesh is known to fit its world.

mod runs;

use std::fmt;

use serde::Deserialize;
use serde_json::Value;

use self::runs::{MAX_RANKS, Run, length, runs_of};
use super::make::{Mesh, MeshSpec, check_listed, check_names};
use super::root::RankMap;
use crate::error::{Error, Result};
use crate::layout::{Dim, Pair, is_disjoint, row_major};

/// The version of the format that is written. No other version is read.
const VERSION: u64 = 1;

/// The most dimensions of a text, as many as `dm_init` takes.
const MAX_DIMS: usize = 1 << 16;

/// The most bytes of a foreign text that a message repeats.
const MAX_QUOTE: usize = 200;

/// A mesh's text, taken apart and checked. It holds no rank list and belongs to no rank.
///
/// ```
/// use devicemesh::mesh::{Mesh, MeshSpec, MeshText};
/// let names = ["dp", "tp"];
/// let spec = MeshSpec::new("cpu", &[2, 4], 8, 6).names(&names);
/// let dp = Mesh::new(&spec).unwrap().slice(&["dp"]).unwrap(); // ranks 2 and 6
/// let text = dp.serialize();
/// assert_eq!(
///     text,
///     r#"{"devicemesh":1,"device_type":"cpu","shape":[2],"names":["dp"],"layout":[[[2,4]]],"base":2,"ranks":[[0,8]]}"#
/// );
/// // Any rank of any world that is large enough can have it, as a root.
/// let parsed = MeshText::parse(&text).unwrap();
/// let again = parsed.mesh(16, 2).unwrap();
/// assert_eq!((again.ranks(), again.coordinate().unwrap()), (vec![2, 6], vec![0]));
/// assert!(again.equals(&dp) && again.hash() == dp.hash());
/// assert!(parsed.mesh(6, 2).is_err()); // has no rank 6
/// ```
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MeshText {
    /// The device type, for example "cuda".
    device_type: String,
    /// The sizes of the dimensions.
    shape: Vec<usize>,
    /// One name for each dimension.
    names: Vec<String>,
    /// One dimension for each size of the shape.
    layout: Vec<Dim>,
    /// The position at coordinate zero.
    base: usize,
    /// The world ranks by position, in runs.
    runs: Vec<Run>,
}

impl Mesh {
    /// Writes this view as text. It takes O(dimensions) where its root has no rank array. Otherwise
    /// its length grows with the number of runs in the list of ranks.
    ///
    /// ```
    /// use devicemesh::mesh::{Mesh, MeshSpec};
    /// let ranks = [7, 5, 3, 1, 0, 2, 9, 8];
    /// let spec = MeshSpec::new("cpu", &[8], 10, 0).ranks(&ranks);
    /// let text = Mesh::new(&spec).unwrap().serialize();
    /// assert!(text.ends_with(r#""layout":[[[8,1]]],"base":0,"ranks":[[7,4,-2],[0,1],[2,1],[9,1],[8,1]]}"#), "{text}");
    /// // A million ranks in a row are one run.
    /// let spec = MeshSpec::new("cuda", &[1024, 1024], 1 << 20, 0);
    /// assert!(Mesh::new(&spec).unwrap().serialize().ends_with(r#""ranks":[[0,1048576]]}"#));
    /// ```
    pub fn serialize(&self) -> String {
        MeshText::of(self).to_string()
    }
}

impl MeshText {
    /// Returns the text of a view.
    pub fn of(mesh: &Mesh) -> MeshText {
        let dims = (0..mesh.ndim()).map(|index| mesh.dim_layout(index).clone()).collect();
        let (layout, base, runs) = match mesh.rank_map_key() {
            RankMap::Identity => (dims, mesh.base(), vec![Run { first: 0, count: mesh.root_size() as u64, step: 1 }]),
            // The mesh exists, so its shape has a row-major layout.
            _ => (row_major(&mesh.shape()).unwrap_or(dims), 0, runs_of(mesh.each_rank())),
        };
        MeshText {
            device_type: mesh.device_type().to_owned(),
            shape: mesh.shape(),
            names: mesh.dim_names().iter().map(|name| (*name).to_owned()).collect(),
            layout,
            base,
            runs,
        }
    }

    /// Takes a text apart, and finds every error in it that shows without a list of its ranks.
    /// Memory and time are in proportion to the text, whatever it says.
    ///
    /// ```
    /// use devicemesh::mesh::MeshText;
    /// let parse = |ranks: &str| {
    ///     let head = r#"{"devicemesh":1,"device_type":"cpu","shape":[4],"names":["dp"],"layout":[[[4,1]]],"base":0"#;
    ///     MeshText::parse(&format!(r#"{head},"ranks":{ranks}}}"#)).map_err(|error| error.to_string())
    /// };
    /// assert_eq!(parse("[[8,2],[6,2,-2]]").unwrap().mesh(16, 0).unwrap().ranks(), [8, 9, 6, 4]);
    /// assert_eq!(parse("[[0,3]]").unwrap_err(), "the layout reaches position 3, but ranks lists only 3 ranks (positions count from 0)");
    /// ```
    pub fn parse(text: &str) -> Result<MeshText> {
        // Later versions may have other keys.
        let Version { devicemesh } = serde_json::from_str(text).map_err(foreign)?;
        if devicemesh != VERSION {
            return Err(Error::invalid(format!(
                "the text of the mesh has version {devicemesh}, but this library (version {}) reads version {VERSION}",
                env!("CARGO_PKG_VERSION")
            )));
        }
        // serde takes a list of values for an object too.
        if !text.trim_ascii_start().starts_with('{') {
            return Err(Error::invalid("not the text of a mesh: a JSON object is wanted, this is a list"));
        }
        let Document { devicemesh: _, device_type, shape, names, layout, base, ranks: runs } =
            serde_json::from_str(text).map_err(foreign)?;
        let ndim = shape.len();
        if ndim > MAX_DIMS || ndim != names.len() || ndim != layout.len() {
            return Err(Error::invalid(format!(
                "shape has {ndim} elements, names {}, layout {}: each has one per dimension, at most {MAX_DIMS}",
                names.len(),
                layout.len()
            )));
        }
        let nul = |(what, text): (String, &String)| text.contains('\0').then_some(what);
        let texts = names.iter().enumerate().map(|(index, name)| (format!("names[{index}]"), name));
        if let Some(what) = texts.chain([("device_type".to_owned(), &device_type)]).find_map(nul) {
            return Err(Error::invalid(format!("{what} contains a NUL, which ends a string in C")));
        }
        check_names(names.iter().map(String::as_str))?;
        row_major(&shape)?;
        let size: usize = shape.iter().product();
        if size > MAX_RANKS {
            return Err(Error::invalid(format!("shape has {size} ranks; a mesh has at most {MAX_RANKS}")));
        }
        check_layout(&shape, &layout, base, length(&runs)?)?;
        let layout = layout.iter().map(|pairs| Dim::new(pairs)).collect::<Result<_>>()?;
        Ok(MeshText { device_type, shape, names, layout, base, runs })
    }

    /// Returns the type of device.
    pub fn device_type(&self) -> &str {
        &self.device_type
    }

    /// Returns the sizes of the dimensions.
    pub fn shape(&self) -> &[usize] {
        &self.shape
    }

    /// Returns the names of the dimensions.
    pub fn names(&self) -> Vec<&str> {
        self.names.iter().map(String::as_str).collect()
    }

    /// Makes the root mesh that the text says, as `rank` of a world of `world_size` sees it. It
    /// takes O(dimensions) where the ranks are 0 .. n-1. No list of the ranks is made before they
    /// are known to fit the world.
    pub fn mesh(&self, world_size: usize, rank: usize) -> Result<Mesh> {
        let names = self.names();
        let (device_type, shape) = (&*self.device_type, &*self.shape);
        let spec = MeshSpec { device_type, shape, names: Some(&names), ranks: None, world_size, rank };
        let in_order = Mesh::new(&spec)?;
        let walk = Dim::join(&self.layout)?;
        if self.is_in_order(&walk) {
            return Ok(in_order);
        }
        check_listed(walk.size())?;
        Mesh::new(&MeshSpec { ranks: Some(&self.ranks(&walk)), ..spec })
    }

    /// Whether the runs show, without a list, that the ranks are 0 .. n-1.
    fn is_in_order(&self, walk: &Dim) -> bool {
        let straight = matches!(walk.pairs(), [] | [(_, 1)]) && self.base == 0;
        straight && self.runs.first().is_some_and(|run| run.is_in_order(walk.size()))
    }

    /// Returns the world ranks, row-major.
    fn ranks(&self, walk: &Dim) -> Vec<i32> {
        let ends = self.runs.iter().scan(0, |end, run| {
            *end += run.count as usize;
            Some(*end)
        });
        let ends: Vec<usize> = ends.collect();
        let at = |position: usize| {
            let index = ends.partition_point(|end| *end <= position);
            let run = self.runs[index];
            run.rank(run.count - (ends[index] - position) as u64)
        };
        (0..walk.size()).map(|index| at(self.base + walk.offset(index))).collect()
    }
}

/// The text is one line without spaces, and the keys are always in this order.
impl fmt::Display for MeshText {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let pairs = |dim: &Dim| dim.pairs().iter().map(|&(size, stride)| [size, stride]).collect();
        let layout: Vec<Vec<[usize; 2]>> = self.layout.iter().map(pairs).collect();
        write!(
            f,
            r#"{{"devicemesh":{VERSION},"device_type":{},"shape":{},"names":{},"layout":{},"base":{},"ranks":["#,
            Value::from(&*self.device_type),
            Value::from(&*self.shape),
            Value::from(self.names()),
            Value::from(layout),
            self.base
        )?;
        for (index, run) in self.runs.iter().enumerate() {
            write!(f, "{}{run}", if index == 0 { "" } else { "," })?;
        }
        f.write_str("]}")
    }
}

#[derive(Deserialize)]
#[serde(expecting = "the object of a mesh, with its version under \"devicemesh\"")]
struct Version {
    devicemesh: u64,
}

/// The keys of the text. All of them are needed.
#[derive(Deserialize)]
#[serde(deny_unknown_fields, expecting = "the object of a mesh")]
struct Document {
    #[allow(dead_code, reason = "read as Version before")]
    devicemesh: u64,
    device_type: String,
    shape: Vec<usize>,
    names: Vec<String>,
    layout: Vec<Vec<Pair>>,
    base: usize,
    ranks: Vec<Run>,
}

/// Returns the error that JSON or its types give for a text, with line and column. It quotes no
/// more of the text than fits a message.
fn foreign(error: serde_json::Error) -> Error {
    let mut text = error.to_string();
    if text.len() > MAX_QUOTE {
        let cut = (0..=MAX_QUOTE).rev().find(|at| text.is_char_boundary(*at)).unwrap_or(0);
        text.truncate(cut);
        text.push_str(&format!("... at line {} column {}", error.line(), error.column()));
    }
    Error::invalid(format!("not the text of a mesh: {text}"))
}

/// Fails unless the layout has this shape, stays within `length` positions and visits none twice.
fn check_layout(shape: &[usize], layout: &[Vec<Pair>], base: usize, length: usize) -> Result<()> {
    let mut last = base as u128;
    for (index, (size, pairs)) in shape.iter().zip(layout).enumerate() {
        let walked = pairs.iter().try_fold(1usize, |product, pair| product.checked_mul(pair.0));
        if walked != Some(*size) {
            let walked = walked.map_or("more than 2^64".to_owned(), |walked| walked.to_string());
            return Err(Error::invalid(format!("layout[{index}] walks {walked} ranks, but shape[{index}] is {size}")));
        }
        if let Some((size, _)) = pairs.iter().find(|(size, stride)| *size > 1 && *stride == 0) {
            return Err(Error::invalid(format!(
                "layout[{index}] has {size} steps of stride 0; a stride is at least 1"
            )));
        }
        // The sizes of all dimensions multiply to less than 2^31, so the sum stays far below 2^128.
        last += pairs.iter().map(|(size, stride)| (*size as u128 - 1) * *stride as u128).sum::<u128>();
    }
    if last >= length as u128 {
        return Err(Error::invalid(format!(
            "the layout reaches position {last}, but ranks lists only {length} ranks (positions count from 0)"
        )));
    }
    // Positions are below 2^31, so no product of a size and a stride overflows. A pair of size 1
    // reaches nothing, so it is left out.
    let pairs: Vec<Pair> = layout.iter().flatten().copied().filter(|(size, _)| *size > 1).collect();
    if !is_disjoint(&pairs) {
        let text: Vec<String> = pairs.iter().map(|(size, stride)| format!("[{size},{stride}]")).collect();
        return Err(Error::invalid(format!(
            "layout has the steps {}, which overlap: in the order of strides, each stride is a multiple of size * stride of the one before",
            text.join(", ")
        )));
    }
    Ok(())
}
