//! Reads the JSON of the vectors in this folder.

use devicemesh::mesh::Mesh;
use devicemesh::ndarray::ArrayViewD;
use serde_json::Value;

/// Returns an array in the form in which PyTorch's `tolist` gives it.
pub fn nested(array: ArrayViewD<'_, i32>) -> Value {
    match array.ndim() {
        0 => Value::from(array.iter().next().copied()),
        _ => array.outer_iter().map(nested).collect(),
    }
}

/// PyTorch takes dimensions by index, too, and counts negative ones from the end. This library
/// takes names.
pub fn dim_name(mesh: &Mesh, dim: &Value) -> Option<String> {
    match dim {
        Value::String(name) => Some(name.clone()),
        Value::Number(index) => {
            let index = index.as_i64()?;
            let index = if index < 0 { index + mesh.ndim() as i64 } else { index };
            let index = usize::try_from(index).ok().filter(|index| *index < mesh.ndim())?;
            Some(mesh.dim_name(index).to_owned())
        }
        _ => None,
    }
}

/// Returns the numbers of a list; none where there is no list.
pub fn numbers<T: TryFrom<i64>>(value: &Value) -> Vec<T> {
    let list = value.as_array().map(Vec::as_slice).unwrap_or_default();
    list.iter().filter_map(|number| T::try_from(number.as_i64()?).ok()).collect()
}

/// Returns the numbers of a nested list, row by row.
pub fn flatten_numbers(value: &Value) -> Vec<i32> {
    match value {
        Value::Array(list) => list.iter().flat_map(flatten_numbers).collect(),
        Value::Number(number) => vec![number.as_i64().unwrap() as i32],
        _ => Vec::new(),
    }
}

/// Returns the shape of a nested list.
pub fn array_shape(value: &Value) -> Vec<usize> {
    match value {
        Value::Array(list) => {
            let inner = list.first().map(array_shape).unwrap_or_default();
            std::iter::once(list.len()).chain(inner).collect()
        }
        _ => Vec::new(),
    }
}

/// Returns an operation as a message shows it, without its result.
pub fn short(op: &Value) -> String {
    let mut copy = op.clone();
    copy.as_object_mut().unwrap().remove("result");
    copy.to_string()
}
