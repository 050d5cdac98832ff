//! The command line of `devicemesh check`.

use std::str::FromStr;
use std::time::Duration;

use clap::Args;
use devicemesh::mesh::Mesh;

use super::operation::Collective;
use super::record_options::RecordOptions;
use super::values::{CHECKED, Kind};
use super::words::bytes;
use crate::byte_size::byte_size;
use crate::duration::duration;
use crate::show::Names;

/// The end of `--help` and of the manual page.
pub const HELP: &str = "\
Examples:
  devicemesh run -n 8 -- devicemesh check 2,2,2 dp,cp,tp --flatten dp,cp=dpcp
  srun devicemesh check -1,8 dp,tp --device cuda --sizes 4B:256MiB --json
  srun devicemesh check -1,8 dp,tp --compare last-week.json --save this-week.json --fail-slow

Exit codes, on every rank:
  0    the data is right, and nothing is slow or --fail-slow is not given
  1    data is wrong
  2    wrong command line, or a shape that does not fit the world
  3    the check could not be made, for example because a rank died, or its report could not be written
  4    something is slow, with --fail-slow
  124  --timeout passed";

/// The options of `devicemesh check`. The comments of the fields are their help.
#[derive(Args)]
pub struct Options {
    /// The sizes of the dimensions, as 2,2,2; one may be -1, what is left of the world [default:
    /// one dimension of all ranks]
    #[arg(value_name = "SIZES", allow_hyphen_values = true)]
    pub shape: Option<Shape>,
    /// Their names, as dp,cp,tp [default: dim_0,dim_1,...]
    #[arg(value_name = "NAMES")]
    pub names: Option<Names>,
    /// cuda or cpu [default: cuda where a driver with a device and NCCL are found]
    #[arg(long, value_name = "TYPE", value_parser = ["cuda", "cpu"])]
    pub device: Option<String>,
    /// The communicator library, by path or SONAME [default: DM_CCL_LIBRARY, else NCCL for cuda and
    /// the embedded engine for cpu]
    #[arg(long, value_name = "LIBRARY")]
    pub library: Option<String>,
    /// One more dimension out of several, as dp,cp=dpcp; may be given again
    #[arg(long, value_name = "NAMES=NAME", value_parser = flatten)]
    pub flatten: Vec<Flatten>,
    /// Only these collectives, as all_reduce,all_gather
    #[arg(long = "op", value_name = "NAMES", value_delimiter = ',')]
    pub collectives: Vec<Collective>,
    /// The type of the elements: int8, uint8, int32, uint32, int64, uint64, float16, float32,
    /// float64 or bfloat16
    #[arg(long, value_name = "TYPE", default_value = "float32", value_parser = kind)]
    pub dtype: Kind,
    /// Bytes that are measured: a range as 4B:64MiB (each 32 times the one before) or a list as
    /// 4B,1MiB [default: 4B,64KiB,1MiB; on cuda 4B,1MiB,64MiB]
    #[arg(long, value_name = "SIZES", value_parser = sizes)]
    pub sizes: Option<Sizes>,
    /// Calls of one timed batch, at most; fewer where they take long
    #[arg(long, value_name = "N", default_value_t = 20, value_parser = clap::value_parser!(u32).range(1..=1_000_000))]
    pub iterations: u32,
    /// Calls before the first batch
    #[arg(long, value_name = "N", default_value_t = 2, value_parser = clap::value_parser!(u32).range(1..=1_000_000))]
    pub warmup: u32,
    /// Timed batches; only what is slow in every one is called slow
    #[arg(long, value_name = "N", default_value_t = 5, value_parser = clap::value_parser!(u32).range(1..=1000))]
    pub repeats: u32,
    /// How many times the time of its peers a group or rank must take to be called slow
    #[arg(long, value_name = "FACTOR", default_value_t = 1.5, value_parser = factor)]
    pub slow_factor: f64,
    /// The bus bandwidth in GB/s that a dimension must reach with the largest size, as tp=300; may
    /// be given again
    #[arg(long, value_name = "NAME=GB/S", value_parser = expect, conflicts_with = "no_measure")]
    pub expect: Vec<(String, f64)>,
    /// Exit with 4 where something is slow
    #[arg(long)]
    pub fail_slow: bool,
    #[command(flatten)]
    pub record: RecordOptions,
    /// Verify, but measure nothing
    #[arg(long)]
    pub no_measure: bool,
    /// End the whole check after this time, which includes the join: seconds, or 90s, 10m, 2h, 1d
    #[arg(long, value_name = "TIME", default_value = "10m", value_parser = timeout)]
    pub timeout: Duration,
    /// The report as one line of JSON
    #[arg(long)]
    pub json: bool,
    /// No progress on standard error
    #[arg(short, long)]
    pub quiet: bool,
}

/// The sizes of the dimensions, as "2,-1,2". `None` stands for what is left of the world.
#[derive(Debug, Clone)]
pub struct Shape(Vec<Option<usize>>);

/// The sizes that are measured, in bytes and in growing order.
#[derive(Debug, Clone)]
pub struct Sizes(pub Vec<usize>);

/// A dimension that is made of others.
#[derive(Debug, Clone)]
pub struct Flatten {
    /// The names of the others.
    dims: Vec<String>,
    /// Its own name.
    pub name: String,
}

/// The options that must be equal on all ranks, as one rank has them on its command line. Each has
/// its name and its value. The value of a flag is empty. `None` says that the rank does not have
/// the option.
pub type Asked = Vec<(String, Option<String>)>;

impl FromStr for Shape {
    type Err = String;

    fn from_str(text: &str) -> Result<Shape, String> {
        // Because sizes may be -1, clap also passes an unknown option to this function.
        if text.trim_start_matches('-').starts_with(|c: char| c.is_alphabetic()) {
            return Err("there is no such option; --help has them all".to_owned());
        }
        let size = |part: &str| match part.trim() {
            "-1" => Ok(None),
            part => match part.parse() {
                Ok(size) if size > 0 => Ok(Some(size)),
                _ => Err(format!("{part:?} is not a size; write it like 2,2,2 or 2,-1")),
            },
        };
        let sizes: Vec<Option<usize>> = text.split(',').map(size).collect::<Result<_, _>>()?;
        match sizes.iter().filter(|size| size.is_none()).count() {
            0 | 1 => Ok(Shape(sizes)),
            more => Err(format!("-1 stands for what is left of the world, and is there {more} times")),
        }
    }
}

impl Shape {
    /// The sizes in a world of that many ranks. They must use all of them.
    pub fn of(shape: Option<&Shape>, world: usize) -> Result<Vec<usize>, String> {
        let Some(Shape(sizes)) = shape else { return Ok(vec![world]) };
        let known = sizes.iter().flatten().try_fold(1usize, |product, size| product.checked_mul(*size));
        let text = sizes.iter().map(|size| size.map_or("-1".to_owned(), |size| size.to_string())).collect::<Vec<_>>();
        let text = text.join(",");
        let open = sizes.iter().any(Option::is_none);
        let fits = |known: &usize| if open { *known <= world && world % known == 0 } else { *known == world };
        let Some(known) = known.filter(fits) else {
            let known = known.map_or("more than can be counted".to_owned(), |known| known.to_string());
            return Err(match open {
                true => format!(
                    "the shape {text} has {known} ranks times what -1 stands for, but the world has {world}: start a multiple of {known}"
                ),
                false => format!(
                    "the shape {text} has {known} ranks, but the world has {world}: start {known}, or let -1 stand for one of the sizes"
                ),
            });
        };
        Ok(sizes.iter().map(|size| size.unwrap_or(world / known)).collect())
    }
}

impl Flatten {
    /// The names of the others, as a mesh takes them.
    pub fn dims(&self) -> Vec<&str> {
        self.dims.iter().map(String::as_str).collect()
    }
}

impl Options {
    /// The collectives that are asked for, each once.
    pub fn collectives(&self) -> Vec<Collective> {
        let asked = |collective: &Collective| self.collectives.is_empty() || self.collectives.contains(collective);
        Collective::ALL.into_iter().filter(asked).collect()
    }

    /// The sizes that are measured.
    pub fn sizes(&self, device_type: &str) -> Vec<usize> {
        match (&self.sizes, device_type) {
            (Some(Sizes(sizes)), _) => sizes.clone(),
            (None, "cuda") => vec![4, 1 << 20, 64 << 20],
            (None, _) => vec![4, 64 << 10, 1 << 20],
        }
    }

    /// Fails where a size of `--sizes` is no whole number of elements.
    pub fn whole_elements(&self) -> Result<(), String> {
        let (element, name) = (self.dtype.bytes(), self.dtype.name());
        let mut sizes = self.sizes.iter().flat_map(|Sizes(sizes)| sizes);
        sizes.find(|size| *size % element != 0).map_or(Ok(()), |size| {
            let next = size.next_multiple_of(element);
            Err(format!(
                "--sizes: {size} B is no whole number of elements of {name}, which have {element} B each; take {next}"
            ))
        })
    }

    /// Returns the options that must be equal on all ranks. `mesh` has the sizes and names of the
    /// dimensions that this rank asks for.
    pub fn asked(&self, mesh: &Mesh, device_type: &str) -> Asked {
        let Options { flatten, dtype, iterations, warmup, repeats, no_measure, timeout, record, .. } = self;
        let flattened = flatten.iter().map(|flat| format!("{}={}", flat.dims.join(","), flat.name));
        let flattened = flattened.collect::<Vec<_>>().join(" --flatten ");
        let sizes = self.sizes(device_type).into_iter().map(|size| bytes(size).replace(' ', "")).collect();
        let collectives = self.collectives().iter().map(|collective| collective.name().to_owned()).collect();
        let given = |value: String| (!value.is_empty()).then_some(value);
        let flag = |is_given: bool| is_given.then(String::new);
        let list = |values: Vec<String>| Some(values.join(","));
        let asked = [
            ("the shape", list(mesh.shape().iter().map(usize::to_string).collect())),
            ("the names", list(mesh.dim_names().iter().map(|name| (*name).to_owned()).collect())),
            ("--flatten", given(flattened)),
            ("--op", list(collectives)),
            ("--dtype", Some(dtype.name().to_owned())),
            ("--sizes", list(sizes)),
            ("--iterations", Some(iterations.to_string())),
            ("--warmup", Some(warmup.to_string())),
            ("--repeats", Some(repeats.to_string())),
            ("--no-measure", flag(*no_measure)),
            ("--timeout", Some(format!("{}s", timeout.as_secs_f64()))),
            // Only rank 0 uses the files, so their names may differ.
            ("--save", flag(record.save.is_some())),
            ("--compare", flag(record.compare.is_some())),
        ];
        asked.into_iter().map(|(name, value)| (name.to_owned(), value)).collect()
    }
}

fn flatten(text: &str) -> Result<Flatten, String> {
    let (dims, name) = text.split_once('=').ok_or("write it like dp,cp=dpcp")?;
    let Names(dims) = dims.parse()?;
    let Names(name) = name.parse()?;
    match &name[..] {
        [name] if !name.is_empty() => Ok(Flatten { dims, name: name.clone() }),
        _ => Err("write it like dp,cp=dpcp".to_owned()),
    }
}

fn expect(text: &str) -> Result<(String, f64), String> {
    let (name, least) = text.split_once('=').ok_or("write it like tp=300")?;
    match least.parse::<f64>() {
        Ok(least) if least > 0.0 && least.is_finite() => Ok((name.to_owned(), least)),
        _ => Err(format!("{least:?} is not a bandwidth in GB/s; write it like tp=300")),
    }
}

fn kind(text: &str) -> Result<Kind, String> {
    let known: Vec<&str> = CHECKED.iter().map(|(name, _)| *name).collect();
    Kind::named(text).ok_or_else(|| format!("not one of {}", known.join(", ")))
}

fn factor(text: &str) -> Result<f64, String> {
    match text.parse::<f64>() {
        Ok(factor) if factor > 1.0 && factor.is_finite() => Ok(factor),
        _ => Err("not a number above 1".to_owned()),
    }
}

fn timeout(text: &str) -> Result<Duration, String> {
    match duration(text)? {
        long if long >= Duration::from_secs(1) => Ok(long),
        _ => Err("a check takes at least 1 second".to_owned()),
    }
}

fn sizes(text: &str) -> Result<Sizes, String> {
    let mut sizes: Vec<usize> = match text.split_once(':') {
        Some((least, most)) => {
            let (least, most) = (byte_size(least)?, byte_size(most)?);
            let steps = std::iter::successors(Some(least), |size| size.checked_mul(32));
            steps.take_while(|size| *size < most).chain([most.max(least)]).collect()
        }
        None => text.split(',').map(byte_size).collect::<Result<_, _>>()?,
    };
    sizes.sort_unstable();
    sizes.dedup();
    Ok(Sizes(sizes))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_ranges_or_lists() {
        assert_eq!(sizes("4B:64KiB").unwrap().0, [4, 128, 4096, 65536]);
        assert_eq!(sizes("1M,4,1MiB").unwrap().0, [4, 1 << 20]);
        assert_eq!(sizes("8:8").unwrap().0, [8]);
        for wrong in ["", "4X", "0", ":", "-4", "99999999999G", "1.5M"] {
            assert!(sizes(wrong).is_err(), "{wrong}");
        }
    }

    #[test]
    fn the_shape_has_all_ranks_of_the_world() {
        let of = |text: &str, world| Shape::of(Some(&text.parse().unwrap()), world);
        assert_eq!(of("2,-1,2", 16).unwrap(), [2, 4, 2]);
        assert_eq!(of("2,2", 4).unwrap(), [2, 2]);
        assert_eq!(Shape::of(None, 6).unwrap(), [6]);
        assert!(of("2,2", 8).unwrap_err().contains("has 4 ranks, but the world has 8: start 4"));
        for (text, world) in [("2,2,2", 4), ("3,-1", 8), ("18446744073709551615,3", 8)] {
            assert!(of(text, world).unwrap_err().contains(&format!("the world has {world}")), "{text}");
        }
        assert!("-1,-1".parse::<Shape>().is_err() && "0".parse::<Shape>().is_err() && "a".parse::<Shape>().is_err());
    }
}
