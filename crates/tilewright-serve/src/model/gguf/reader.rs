//! Parser of the GGUF header: metadata, and the type, shape and byte range of each tensor.
//!
//! Layout, little-endian: magic `GGUF`, version u32, number of tensors u64, number of metadata entries u64, the entries (name, type
//! u32, value), the tensors (name, number of axes u32, extents u64 with the contiguous axis first, type u32, offset u64), padding
//! to `general.alignment`, tensor data. A string is its length in bytes (u64) and UTF-8.
//!
//! Invariant: every byte range is inside the file and has the length of its type and shape. Counts are checked against the
//! remaining bytes before memory is reserved, and metadata has at most [`MAX_VALUES`] values.

use super::blocks::TensorType;
use serde_json::{Map, Number, Value};
use std::{collections::BTreeMap, ops::Range};

const MAGIC: [u8; 4] = *b"GGUF";
const VERSIONS: [u32; 2] = [2, 3];

/// Alignment of tensor data unless `general.alignment` sets one.
const ALIGNMENT: u64 = 32;
const ALIGNMENT_KEY: &str = "general.alignment";

/// Maximum number of metadata values, array elements included. The largest published vocabularies have 262,144 tokens with as many
/// scores and types, and 514,906 merges.
const MAX_VALUES: usize = 1 << 22;

/// Maximum axes of a tensor in the format.
const MAX_AXES: u32 = 4;

/// The parsed header.
#[derive(Debug)]
pub(super) struct Header {
    pub(super) metadata: Map<String, Value>,
    pub(super) tensors: BTreeMap<String, TensorInfo>,
}

/// Location, type and shape of a tensor.
#[derive(Debug)]
pub(super) struct TensorInfo {
    pub(super) kind: TensorType,
    /// Row-major, the contiguous axis last.
    pub(super) shape: Vec<usize>,
    /// In the file.
    pub(super) bytes: Range<usize>,
}

/// A tensor whose data offset is relative to the end of the header.
struct RelativeTensor {
    name: String,
    kind: TensorType,
    shape: Vec<usize>,
    offset: u64,
    len: u64,
}

type Result<T> = std::result::Result<T, String>;

/// Parses the header of `file`. The error is the text after the file's name.
pub(super) fn parse(file: &[u8]) -> Result<Header> {
    let mut cursor = Cursor { file, at: 0, values: 0 };
    check_version(&mut cursor)?;
    let (num_tensors, num_entries) =
        (cursor.u64("the number of tensors")?, cursor.u64("the metadata count")?);
    // the least bytes of an entry: an empty name, a type and one byte; of a tensor: an empty name, no axes, a type and an offset
    let num_entries = cursor.count("metadata_kv_count", num_entries, 8 + 4 + 1)?;
    let metadata = metadata(&mut cursor, num_entries)?;
    let num_tensors = cursor.count("tensor_count", num_tensors, 8 + 4 + 4 + 8)?;
    let alignment = alignment(&metadata)?;
    let tensors = (0..num_tensors).map(|_| cursor.tensor(alignment)).collect::<Result<Vec<_>>>()?;
    let start = (cursor.at as u64).checked_next_multiple_of(alignment).unwrap_or(u64::MAX);
    let mut located = BTreeMap::new();
    for tensor in tensors {
        let name = tensor.name.clone();
        let info = tensor.locate(start, file.len())?;
        if located.insert(name.clone(), info).is_some() {
            return Err(format!("tensor {name} occurs twice"));
        }
    }
    Ok(Header { metadata, tensors: located })
}

fn check_version(cursor: &mut Cursor<'_>) -> Result<()> {
    let magic: [u8; 4] = cursor.array("the magic")?;
    if magic != MAGIC {
        return Err(format!("begins with \"{}\", expected \"GGUF\"", magic.escape_ascii()));
    }
    let version = cursor.u32("the version")?;
    if VERSIONS.contains(&version.swap_bytes()) {
        return Err(format!("version = {version:#010x} is big-endian, expected a little-endian file"));
    }
    if !VERSIONS.contains(&version) {
        return Err(format!("version = {version} is not supported, expected 2 or 3"));
    }
    Ok(())
}

fn metadata(cursor: &mut Cursor<'_>, count: usize) -> Result<Map<String, Value>> {
    let mut metadata = Map::new();
    for _ in 0..count {
        let key = cursor.text("the name of a metadata entry")?;
        let kind = cursor.u32(&key)?;
        let value = cursor.value(&key, kind)?;
        if metadata.insert(key.clone(), value).is_some() {
            return Err(format!("metadata {key} occurs twice"));
        }
    }
    Ok(metadata)
}

fn alignment(metadata: &Map<String, Value>) -> Result<u64> {
    match metadata.get(ALIGNMENT_KEY) {
        None => Ok(ALIGNMENT),
        Some(value) => match value.as_u64() {
            Some(alignment) if alignment.is_power_of_two() && alignment <= 1 << 20 => Ok(alignment),
            _ => Err(format!("{ALIGNMENT_KEY} = {value}, expected a power of two up to 1048576")),
        },
    }
}

impl RelativeTensor {
    /// The range of the tensor in a file of `len` bytes whose tensor data begins at `start`.
    fn locate(self, start: u64, len: usize) -> Result<TensorInfo> {
        let begin = start.checked_add(self.offset);
        let end = begin.and_then(|begin| begin.checked_add(self.len));
        match (begin, end) {
            (Some(begin), Some(end)) if end <= len as u64 => {
                Ok(TensorInfo { kind: self.kind, shape: self.shape, bytes: begin as usize..end as usize })
            }
            _ => {
                let Self { name, offset, len: bytes, .. } = self;
                Err(format!(
                    "is truncated: {len} bytes, and tensor {name} has {bytes} bytes at offset {offset} of the data at {start}"
                ))
            }
        }
    }
}

/// A read position in the file.
struct Cursor<'a> {
    file: &'a [u8],
    at: usize,
    /// Metadata values so far.
    values: usize,
}

impl<'a> Cursor<'a> {
    fn take(&mut self, len: usize, what: &str) -> Result<&'a [u8]> {
        let bytes = self.at.checked_add(len).and_then(|end| self.file.get(self.at..end));
        let bytes = bytes.ok_or_else(|| {
            let (size, at) = (self.file.len(), self.at);
            format!("is truncated: {size} bytes, and {what} needs {len} bytes at {at}")
        })?;
        self.at += len;
        Ok(bytes)
    }

    fn array<const N: usize>(&mut self, what: &str) -> Result<[u8; N]> {
        Ok(self.take(N, what)?.try_into().expect("`take` returns N bytes"))
    }

    fn u32(&mut self, what: &str) -> Result<u32> {
        self.array(what).map(u32::from_le_bytes)
    }

    fn u64(&mut self, what: &str) -> Result<u64> {
        self.array(what).map(u64::from_le_bytes)
    }

    /// A count of items with at least `bytes` bytes each, which the rest of the file must be able to hold.
    fn count(&self, what: &str, count: u64, bytes: usize) -> Result<usize> {
        let rest = self.file.len() - self.at;
        match usize::try_from(count) {
            Ok(count) if count <= rest / bytes => Ok(count),
            _ => Err(format!("{what} = {count}, expected at most {}: {rest} bytes remain", rest / bytes)),
        }
    }

    fn text(&mut self, what: &str) -> Result<String> {
        let len = self.u64(what)?;
        let len = self.count(&format!("the length of {what}"), len, 1)?;
        let bytes = self.take(len, what)?;
        std::str::from_utf8(bytes).map(str::to_owned).map_err(|error| format!("{what} is not UTF-8: {error}"))
    }

    /// A value of metadata type `kind`.
    fn value(&mut self, key: &str, kind: u32) -> Result<Value> {
        const ARRAY: u32 = 9;
        if kind != ARRAY {
            return self.scalar(key, kind);
        }
        let kind = self.u32(key)?;
        let len = self.u64(key)?;
        let bytes = match kind {
            0 | 1 | 7 => 1,
            2 | 3 => 2,
            4..=6 => 4,
            8 | 10..=12 => 8,
            _ => {
                return Err(format!(
                    "{key} is an array of type {kind}, expected numbers, booleans or strings"
                ));
            }
        };
        let len = self.count(&format!("the length of {key}"), len, bytes)?;
        (0..len).map(|_| self.scalar(key, kind)).collect::<Result<Vec<_>>>().map(Value::Array)
    }

    fn scalar(&mut self, key: &str, kind: u32) -> Result<Value> {
        self.values += 1;
        if self.values > MAX_VALUES {
            return Err(format!("{key}: the metadata has more than {MAX_VALUES} values"));
        }
        // NaN and infinity have no JSON number; they become null, which readers of the fields treat as absent
        let float = |value: f64| Number::from_f64(value).map_or(Value::Null, Value::Number);
        Ok(match kind {
            0 => u8::from_le_bytes(self.array(key)?).into(),
            1 => i8::from_le_bytes(self.array(key)?).into(),
            2 => u16::from_le_bytes(self.array(key)?).into(),
            3 => i16::from_le_bytes(self.array(key)?).into(),
            4 => self.u32(key)?.into(),
            5 => i32::from_le_bytes(self.array(key)?).into(),
            6 => float(f32::from_le_bytes(self.array(key)?).into()),
            7 => match self.array(key)? {
                [0u8] => false.into(),
                [1] => true.into(),
                [other] => return Err(format!("{key} = {other}, expected a boolean, 0 or 1")),
            },
            8 => self.text(key)?.into(),
            10 => self.u64(key)?.into(),
            11 => i64::from_le_bytes(self.array(key)?).into(),
            12 => float(f64::from_le_bytes(self.array(key)?)),
            _ => return Err(format!("{key} has metadata type {kind}, expected 0 to 12")),
        })
    }

    fn tensor(&mut self, alignment: u64) -> Result<RelativeTensor> {
        let name = self.text("the name of a tensor")?;
        let axes = self.u32(&name)?;
        if axes > MAX_AXES {
            return Err(format!("tensor {name} has {axes} axes, expected at most {MAX_AXES}"));
        }
        let mut shape = (0..axes).map(|_| self.u64(&name)).collect::<Result<Vec<_>>>()?;
        let id = self.u32(&name)?;
        let kind = TensorType::from_id(id).map_err(|text| format!("tensor {name} {text}"))?;
        let offset = self.u64(&name)?;
        if !offset.is_multiple_of(alignment) {
            return Err(format!("tensor {name} has offset {offset}, expected a multiple of {alignment}"));
        }
        let (elements, bytes) = kind.block();
        let columns = shape.first().copied().unwrap_or(1);
        if !columns.is_multiple_of(elements) {
            let message =
                format!("tensor {name} is {kind} with rows of {columns}, expected a multiple of {elements}");
            return Err(message);
        }
        let count = shape.iter().try_fold(1u64, |count, &extent| count.checked_mul(extent));
        let len = count.and_then(|count| (count / elements).checked_mul(bytes));
        let len = len
            .ok_or_else(|| format!("tensor {name} has shape {shape:?}, more elements than 64 bits count"))?;
        shape.reverse();
        // each extent is at most the file's length or the tensor is empty, unless `locate` refuses the tensor
        let shape = shape.into_iter().map(|extent| usize::try_from(extent).unwrap_or(usize::MAX)).collect();
        Ok(RelativeTensor { name, kind, shape, offset, len })
    }
}
