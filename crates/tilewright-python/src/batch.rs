//! Batches: the arrays of one step, copied from Python.

use crate::{
    Flags, IndexArg, Integers, Keywords, TensorArg, TensorDtype, fields_of_tuple, integers::Bytes, invalid,
    raised,
};
use pyo3::{Borrowed, prelude::*};
use tilewright::{
    Batch, PageTable, Result,
    attention::{BitOrder, KvTable, Level, PackedMask, Shard, packbits},
    kv::{BlockSparse, PageIndices, VariableBlockSparse},
};

const OPERATOR: &str = "attention.batch";

/// The arrays of a page table.
pub(crate) struct PageArrays {
    indptr: Integers,
    indices: IndexArg,
    last_page_len: Integers,
    page_size: usize,
}

fields_of_tuple!(PageArrays { indptr, indices, last_page_len, page_size });

impl PageArrays {
    pub(crate) fn table(&self) -> Result<PageTable<'_>> {
        let indices: PageIndices<'_> = match &self.indices {
            IndexArg::Host(integers) => integers.index().into(),
            IndexArg::Device(tensor) => tensor.integers::<i32>(OPERATOR, "page indices")?.into(),
        };
        Ok(PageTable::new(self.indptr.index(), indices, self.last_page_len.index(), self.page_size))
    }
}

/// One cascade level.
#[derive(FromPyObject)]
#[pyo3(from_item_all)]
struct LevelArrays {
    qo_indptr: Integers,
    table: PageArrays,
}

impl LevelArrays {
    fn level(&self) -> Result<Level<'_>> {
        Ok(Level { qo_indptr: self.qo_indptr.index(), table: self.table.table()? })
    }
}

/// Blocks of one size.
#[derive(FromPyObject)]
#[pyo3(from_item_all)]
struct BlockArrays {
    indptr: Integers,
    indices: Integers,
    block_rows: usize,
    block_columns: usize,
    kv_len: usize,
    mask: Option<Flags>,
}

/// Blocks of variable size.
#[derive(FromPyObject)]
#[pyo3(from_item_all)]
struct VariableBlockArrays {
    blocks: Flags,
    row_sizes: Integers,
    column_sizes: Integers,
}

/// Packed bits of a mask, copied from the host or on a device.
enum MaskBytes {
    Host(Vec<u8>),
    Device(TensorArg),
}

impl<'py> FromPyObject<'_, 'py> for MaskBytes {
    type Error = PyErr;

    fn extract(object: Borrowed<'_, 'py, PyAny>) -> PyResult<Self> {
        match TensorArg::exported(&object)? {
            Some(tensor) if !tensor.on_host() => {
                if tensor.dtype() != TensorDtype::U8 {
                    let text = format!("mask is {}, expected uint8", tensor.dtype());
                    return Err(invalid(OPERATOR, text));
                }
                Ok(Self::Device(tensor.flags().owned_by(object.to_owned().unbind())))
            }
            _ => object.extract().map(|Bytes(bytes)| Self::Host(bytes)),
        }
    }
}

impl MaskBytes {
    fn mask<'a>(&'a self, columns: &'a Option<Integers>) -> Result<PackedMask<'a>> {
        let bits: &[u8] = if let Self::Host(bits) = self { bits } else { &[] };
        let mask = match columns {
            Some(columns) => PackedMask::last(bits, columns.index()),
            None => PackedMask::new(bits),
        };
        match self {
            Self::Host(_) => Ok(mask),
            Self::Device(tensor) => mask.on_device(tensor.view(OPERATOR, "mask")?),
        }
    }
}

/// The keywords of a batch; exactly one of the tables is not `None`.
#[derive(FromPyObject)]
#[pyo3(from_item_all)]
pub(crate) struct BatchFields {
    qo_indptr: Option<Integers>,
    table: Option<PageArrays>,
    kv_indptr: Option<Integers>,
    blocks: Option<BlockArrays>,
    variable_blocks: Option<VariableBlockArrays>,
    mask: Option<MaskBytes>,
    mask_columns: Option<Integers>,
    levels: Option<Vec<LevelArrays>>,
    shared_prefixes: bool,
    shard_offsets: Option<Integers>,
    shard_lens: Option<Integers>,
}

/// The storage of keys and values.
enum Storage {
    Paged(PageArrays),
    Ragged(Integers),
    Blocks(BlockArrays, Option<Vec<u8>>),
    VariableBlocks(VariableBlockArrays),
}

/// The requests of one step.
#[pyclass(frozen, module = "tilewright._core", name = "Batch")]
pub(crate) struct PyBatch {
    qo_indptr: Integers,
    storage: Storage,
    mask: Option<(MaskBytes, Option<Integers>)>,
    levels: Vec<LevelArrays>,
    shared_prefixes: bool,
    shard: Option<[Integers; 2]>,
}

#[pymethods]
impl PyBatch {
    #[new]
    fn new(fields: Keywords<BatchFields>) -> PyResult<Self> {
        let Keywords(fields) = fields;
        let BatchFields { table, kv_indptr, blocks, variable_blocks, .. } = fields;
        let storage = match (table, kv_indptr, blocks, variable_blocks) {
            (Some(table), None, None, None) => Storage::Paged(table),
            (None, Some(indptr), None, None) => Storage::Ragged(indptr),
            (None, None, Some(blocks), None) => {
                let bits = blocks.mask.as_ref().map(|Flags(flags)| packbits(flags, BitOrder::Little));
                Storage::Blocks(blocks, bits)
            }
            (None, None, None, Some(blocks)) => Storage::VariableBlocks(blocks),
            _ => return Err(invalid(OPERATOR, "expected one of pages, ragged tokens and blocks")),
        };
        let shard = match (fields.shard_offsets, fields.shard_lens) {
            (None, None) => None,
            (Some(offsets), Some(lens)) => Some([offsets, lens]),
            _ => return Err(invalid(OPERATOR, "a shard needs both kv_offsets and kv_lens")),
        };
        Ok(Self {
            qo_indptr: fields.qo_indptr.unwrap_or(Integers::I64(Vec::new())),
            storage,
            mask: fields.mask.map(|bits| (bits, fields.mask_columns)),
            levels: fields.levels.unwrap_or_default(),
            shared_prefixes: fields.shared_prefixes,
            shard,
        })
    }

    /// Queries over pages, without the lookups of keywords.
    #[staticmethod]
    fn paged(qo_indptr: Integers, table: PageArrays) -> Self {
        let (storage, levels) = (Storage::Paged(table), Vec::new());
        Self { qo_indptr, storage, mask: None, levels, shared_prefixes: false, shard: None }
    }
}

impl PyBatch {
    /// Calls `work` with the batch.
    pub(crate) fn with<T>(&self, work: impl FnOnce(&Batch<'_>) -> Result<T>) -> PyResult<T> {
        let qo_indptr = self.qo_indptr.index();
        let mut batch = match self.kv_table().map_err(raised)? {
            KvTable::Paged(table) => Batch::paged(qo_indptr, table),
            KvTable::Ragged { indptr } => Batch::ragged(qo_indptr, indptr),
            KvTable::Blocks(blocks) => Batch::block_sparse(blocks),
            KvTable::VariableBlocks(blocks) => Batch::variable_block_sparse(blocks),
        };
        if let Some((bits, columns)) = &self.mask {
            batch = batch.with_mask(bits.mask(columns).map_err(raised)?);
        }
        let levels: Result<Vec<Level<'_>>> = self.levels.iter().map(LevelArrays::level).collect();
        let levels = levels.map_err(raised)?;
        batch = match (self.shared_prefixes, levels.is_empty()) {
            (true, true) => batch.with_shared_prefixes(),
            (true, false) => {
                return Err(invalid(OPERATOR, "shared_prefixes detects levels, expected no levels with it"));
            }
            (false, _) => batch.with_levels(&levels),
        };
        if let Some([offsets, lens]) = &self.shard {
            batch = batch.with_shard(Shard { kv_offsets: offsets.index(), kv_lens: lens.index() });
        }
        work(&batch).map_err(raised)
    }

    fn kv_table(&self) -> Result<KvTable<'_>> {
        Ok(match &self.storage {
            Storage::Paged(table) => KvTable::Paged(table.table()?),
            Storage::Ragged(indptr) => KvTable::Ragged { indptr: indptr.index() },
            Storage::Blocks(blocks, mask) => KvTable::Blocks(BlockSparse {
                indptr: blocks.indptr.index(),
                indices: blocks.indices.index(),
                block: (blocks.block_rows, blocks.block_columns),
                kv_len: blocks.kv_len,
                mask: mask.as_deref(),
            }),
            Storage::VariableBlocks(blocks) => KvTable::VariableBlocks(VariableBlockSparse {
                blocks: &blocks.blocks.0,
                row_sizes: blocks.row_sizes.index(),
                column_sizes: blocks.column_sizes.index(),
            }),
        })
    }
}
