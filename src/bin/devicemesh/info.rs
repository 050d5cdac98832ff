//! `devicemesh info`: what the library finds on this machine and in this environment.

use std::fmt::Write as _;
use std::io::Write as _;

use clap::Args;
use devicemesh::ccl::{self, Library};
use devicemesh::rendezvous::launcher;

use crate::ranks::Failure;

/// What is asked of `devicemesh info`.
#[derive(Args)]
pub(crate) struct Options {
    /// A communicator library to look at, by path or SONAME, as dm_world_options.ccl_library
    #[arg(long, value_name = "LIBRARY")]
    library: Option<String>,
}

/// Prints it; nothing that is missing is a failure.
pub(crate) fn info(options: &Options) -> Result<u8, Failure> {
    let mut text = format!("devicemesh {}\n", env!("CARGO_PKG_VERSION"));
    let mut line = |what: &str, said: String| {
        let _ = writeln!(text, "{what:<12}{said}");
    };
    line("cpu", library(ccl::for_device("cpu", None).map(|library| describe(&library))));
    line("cuda", library(ccl::for_device("cuda", options.library.as_deref()).map(|library| describe(&library))));
    line(
        "devices",
        match ccl::devices() {
            Ok((count, release)) => format!("{count}, driver for CUDA {release}"),
            Err(error) => format!("none: {}", error.message()),
        },
    );
    line(
        "launcher",
        match launcher::detect(&|name| std::env::var(name).ok()) {
            Ok(place) => {
                let address = place.address.map_or(String::new(), |(host, port)| format!(", meeting at {host}:{port}"));
                let launcher::Place { launcher, rank, size, local_rank, .. } = place;
                format!("{launcher}: rank {rank} of {size}, local rank {local_rank}{address}")
            }
            Err(error) => error.message().to_owned(),
        },
    );
    std::io::stdout().write_all(text.as_bytes()).map_err(|error| Failure::new(1, error.to_string()))?;
    Ok(0)
}

fn describe(library: &Library) -> String {
    let version = library.version();
    format!("{}, NCCL {}.{}.{}", library.name(), version / 10_000, version / 100 % 100, version % 100)
}

fn library(found: devicemesh::error::Result<String>) -> String {
    found.unwrap_or_else(|error| format!("none: {}", error.message()))
}
