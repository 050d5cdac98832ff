//! How a view was taken from its root mesh, so that the same view of another root mesh can be
//! taken. A recovery gives such a root mesh (next_mesh.rs).

use serde::{Deserialize, Serialize};

use super::options::DimOptions;

/// The steps from a root mesh to one of its views.
pub(super) type Path = Vec<Step>;

/// One call that takes a view from another one.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) enum Step {
    /// The named dimensions.
    Slice(Vec<String>),
    /// All dimensions joined into one of this name.
    Flatten(String),
    /// A dimension replaced by several.
    Unflatten { dim: String, sizes: Vec<usize>, names: Vec<String> },
    /// All ranks under another shape.
    Reshape { sizes: Vec<usize>, names: Vec<String> },
    /// One of the parallel copies of the named dimensions.
    Submesh { names: Vec<String>, index: usize },
    /// The dimensions of several views side by side.
    Concatenate(Vec<Path>),
}

/// Dimensions that a call has made on a root mesh, beside the root's own.
#[derive(Debug, Clone)]
pub(super) struct MadeDims {
    /// The path of the view that the call gave. The last step of the path is the call.
    pub(super) path: Path,
    /// The options of the new dimensions; empty for the defaults.
    pub(super) options: Vec<DimOptions>,
}

/// The part of [`MadeDims`] that travels between ranks. A library's configuration has pointers, so
/// it does not travel.
#[derive(Serialize, Deserialize)]
struct Sent {
    path: Path,
    /// For each dimension whether it has a communicator of its own, and the communicator's name.
    options: Vec<(bool, Option<String>)>,
}

/// Returns the text by which a rank tells others which dimensions were made.
pub(super) fn to_text(made: &[MadeDims]) -> String {
    let sent = |made: &MadeDims| Sent {
        path: made.path.clone(),
        options: made.options.iter().map(|options| (options.own, options.name.clone())).collect(),
    };
    let sent: Vec<Sent> = made.iter().map(sent).collect();
    serde_json::to_string(&sent).unwrap_or_default()
}

/// Reads a text of [`to_text`]; `None` where it cannot be read. With `configs` the dimensions get
/// the configurations that this rank has for them in `own`. Without `configs` the dimensions get
/// no configuration, because configurations must be equal on all ranks, and a rank that has joined
/// does not know them.
pub(super) fn from_text(text: &[u8], own: &[MadeDims], configs: bool) -> Option<Vec<MadeDims>> {
    let sent: Vec<Sent> = serde_json::from_slice(text).ok()?;
    let read = |sent: Sent| {
        let known = own.iter().find(|known| configs && known.path == sent.path);
        let config = |index: usize| known.and_then(|known| known.options.get(index)?.config.clone());
        let options = sent.options.into_iter().enumerate();
        let options = options.map(|(index, (own, name))| DimOptions { own, config: config(index), name }).collect();
        MadeDims { path: sent.path, options }
    };
    Some(sent.into_iter().map(read).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn made_dimensions_are_read_as_they_are_written() {
        let path = vec![Step::Slice(vec!["dp".into(), "tp".into()]), Step::Flatten("\"flat\"".into())];
        let made = MadeDims { path: path.clone(), options: vec![DimOptions::default().own().name("a b")] };
        let read = from_text(to_text(&[made]).as_bytes(), &[], true).unwrap();
        assert_eq!((read.len(), &read[0].path), (1, &path));
        assert_eq!((read[0].options[0].own, read[0].options[0].name.as_deref()), (true, Some("a b")));
        assert!(from_text(b"[{}]", &[], true).is_none());
    }
}
