//! Block-sparse attention (BSR): one request whose blocks of query rows attend to some blocks of keys.
//!
//! ```text
//! block = (2, 3), kv_len = 9             keys  0 1 2  3 4 5  6 7 8
//! indptr   0  2  3                 rows 0..2   x x x         x x x       indices[0..2] = 0 2
//! indices  0  2  1                 rows 2..4          x x x              indices[2..3] = 1
//! ```
//!
//! Queries are `[num_rows, num_qo_heads, head_dim]`; keys and values are ragged tensors of `kv_len` tokens in the
//! problem's layout. Row `i` has position `kv_len - num_rows + i`, so causal masks and windows are the same as without
//! blocks.

use crate::{
    Error, Result,
    attention::{Index, KvSource, MaskBits, Problem, Request, Requests, Segment, SegmentMask},
};
use std::ops::Range;

/// Blocks of one size, shared by all heads (BSR).
#[derive(Debug, Clone, Copy)]
pub struct BlockSparse<'a> {
    /// `[num_block_rows + 1]`: block row `b` attends to the blocks `indices[indptr[b]..indptr[b + 1]]`.
    pub indptr: Index<'a>,
    /// Block columns, ascending within a block row.
    pub indices: Index<'a>,
    /// Query rows and keys per block, `(R, C)`.
    pub block: (usize, usize),
    /// Keys of the request, a multiple of `C`.
    pub kv_len: usize,
    /// Bits `[indices.len(), R, C]`, row-major, packed little-endian without padding; a 1 makes the key visible.
    pub mask: Option<&'a [u8]>,
}

/// Blocks of variable size per KV head.
#[derive(Debug, Clone, Copy)]
pub struct VariableBlockSparse<'a> {
    /// `[num_kv_heads, num_block_rows, num_block_columns]`, row-major: whether a block is attended to.
    pub blocks: &'a [bool],
    /// `[num_kv_heads, num_block_rows]`: query rows of each block row; the total is equal for all heads.
    pub row_sizes: Index<'a>,
    /// `[num_kv_heads, num_block_columns]`: keys of each block column; the total is equal for all heads.
    pub column_sizes: Index<'a>,
}

impl BlockSparse<'_> {
    /// Checks the blocks and builds one segment per block row.
    pub(crate) fn resolve(&self, operator: &'static str, problem: &Problem) -> Result<Requests> {
        let (rows, columns) = self.block;
        let text = "expected at least (1, 1)";
        crate::ensure!(rows > 0 && columns > 0, operator, "block = {:?}, {text}", self.block);
        crate::ensure!(
            self.kv_len.is_multiple_of(columns),
            operator,
            "kv_len = {} is not a multiple of the {columns} keys of a block",
            self.kv_len
        );
        crate::ensure!(
            !self.indptr.is_empty(),
            operator,
            "indptr has no entries, expected num_block_rows + 1"
        );
        let count = self.indptr.len() - 1;
        let ranges = self.indptr.ranges_of(operator, "indptr", "block row", count)?;
        let owned = ranges.last().map_or(0, |range| range.end);
        crate::ensure!(
            owned == self.indices.len(),
            operator,
            "indptr ends at {owned}, but indices has {} blocks",
            self.indices.len()
        );
        let num_rows = count.checked_mul(rows);
        let fits = |len: usize| len <= i32::MAX as usize;
        let Some(num_rows) = num_rows.filter(|&num_rows| fits(num_rows) && fits(self.kv_len)) else {
            let text = format!(
                "{count} block rows of {rows} rows and kv_len = {}, the most is {}",
                self.kv_len,
                i32::MAX
            );
            return Err(Error::new(operator, text));
        };
        for (b, range) in ranges.iter().enumerate() {
            self.check_row(operator, b, range)?;
        }
        let (bits, masks) = self.row_bits(operator, &ranges)?;
        let segment = |(b, range): (usize, &Range<usize>)| Segment {
            qo: b * rows..(b + 1) * rows,
            kv_heads: 0..problem.heads().kv,
            kv_start: range.start,
            kv_len: range.len() * columns,
            base: 0,
            request: Some(0),
            shared: false,
            mask: masks.get(b).copied(),
        };
        Ok(Requests {
            requests: one_request(num_rows, self.kv_len),
            segments: ranges.iter().enumerate().map(segment).collect(),
            source: KvSource::Blocks {
                indices: self.indices.to_i32(operator, "block")?,
                block: columns,
                tokens: self.kv_len,
            },
            mask: bits,
        })
    }

    fn check_row(&self, operator: &'static str, b: usize, range: &Range<usize>) -> Result<()> {
        let blocks = self.kv_len / self.block.1;
        let mut before = -1;
        for at in range.clone() {
            let block = self.indices.get(at);
            crate::ensure!(
                (0..blocks as i64).contains(&block),
                operator,
                "block row {b}: block = {block} is not in 0..{blocks}"
            );
            crate::ensure!(
                block > before,
                operator,
                "block row {b}: block {block} comes after {before}, expected ascending columns"
            );
            before = block;
        }
        Ok(())
    }

    /// Converts bits from `[blocks, R, C]` to `[R, blocks of the row * C]` per block row.
    fn row_bits(
        &self,
        operator: &'static str,
        ranges: &[Range<usize>],
    ) -> Result<(MaskBits, Vec<SegmentMask>)> {
        let Some(mask) = self.mask else { return Ok((MaskBits::default(), Vec::new())) };
        let (rows, columns) = self.block;
        let expected = (self.indices.len() * rows * columns).div_ceil(8);
        crate::ensure!(
            mask.len() == expected,
            operator,
            "mask has {} bytes, expected {expected}: ceil(blocks * R * C / 8)",
            mask.len()
        );
        let bits = self.indices.len() * rows * columns;
        let mut bytes = vec![0_u8; bits.div_ceil(8)];
        let mut masks = Vec::with_capacity(ranges.len());
        let mut to = 0;
        for range in ranges {
            masks.push(SegmentMask { first_bit: to, columns: range.len() * columns });
            for (row, block) in (0..rows).flat_map(|row| range.clone().map(move |block| (row, block))) {
                let from = (block * rows + row) * columns;
                for bit in from..from + columns {
                    bytes[to / 8] |= (mask[bit / 8] >> (bit % 8) & 1) << (to % 8);
                    to += 1;
                }
            }
        }
        Ok((MaskBits::from_bytes(bytes), masks))
    }
}

impl VariableBlockSparse<'_> {
    /// Checks the blocks and builds one segment per head and block row, indexed by token.
    pub(crate) fn resolve(&self, operator: &'static str, problem: &Problem) -> Result<Requests> {
        let heads = problem.heads().kv;
        let rows = BlockBounds::new(operator, "row_sizes", self.row_sizes, heads)?;
        let columns = BlockBounds::new(operator, "column_sizes", self.column_sizes, heads)?;
        let expected = heads.saturating_mul(rows.blocks).saturating_mul(columns.blocks);
        crate::ensure!(
            self.blocks.len() == expected,
            operator,
            "blocks has {} flags, expected num_kv_heads * block rows * block columns = {expected}",
            self.blocks.len()
        );
        let keys = columns.count_keys(self.blocks, rows.blocks);
        crate::ensure!(
            keys <= MAX_KEYS,
            operator,
            "block rows look at {keys} keys in all, the most is {MAX_KEYS}"
        );
        let (mut segments, mut indices) = (Vec::new(), Vec::with_capacity(keys));
        for (head, b) in (0..heads).flat_map(|head| (0..rows.blocks).map(move |b| (head, b))) {
            let first = (head * rows.blocks + b) * columns.blocks;
            let flags = &self.blocks[first..first + columns.blocks];
            let kv_start = indices.len();
            let attended = (0..columns.blocks).filter(|&column| flags[column]);
            indices.extend(attended.flat_map(|column| columns.range(head, column)).map(|token| token as i32));
            segments.push(Segment {
                qo: rows.range(head, b),
                kv_heads: head..head + 1,
                kv_start,
                kv_len: indices.len() - kv_start,
                base: 0,
                request: Some(0),
                shared: false,
                mask: None,
            });
        }
        let source = KvSource::Blocks { indices, block: 1, tokens: columns.total };
        let requests = one_request(rows.total, columns.total);
        Ok(Requests { requests, segments, source, mask: MaskBits::default() })
    }
}

/// Maximum number of keys of variable blocks: each takes 4 bytes of the plan.
const MAX_KEYS: usize = 1 << 28;

/// Block bounds of each head.
struct BlockBounds {
    /// `[heads, blocks + 1]`
    bounds: Vec<usize>,
    blocks: usize,
    /// Total size, equal for all heads.
    total: usize,
}

impl BlockBounds {
    fn new(operator: &'static str, name: &str, sizes: Index<'_>, heads: usize) -> Result<Self> {
        crate::ensure!(
            sizes.len().is_multiple_of(heads),
            operator,
            "{name} has {} entries, expected a multiple of num_kv_heads = {heads}",
            sizes.len()
        );
        let blocks = sizes.len() / heads;
        let mut bounds = Vec::with_capacity(sizes.len() + heads);
        let mut total = None;
        for head in 0..heads {
            let mut end = 0;
            bounds.push(end);
            for block in 0..blocks {
                let size = sizes.get(head * blocks + block);
                crate::ensure!(size >= 0, operator, "KV head {head}: {name}[{block}] = {size} is negative");
                end = (end as i64).saturating_add(size) as usize;
                bounds.push(end);
            }
            let all = *total.get_or_insert(end);
            crate::ensure!(
                end <= i32::MAX as usize,
                operator,
                "KV head {head}: {name} add up to {end}, the most is {}",
                i32::MAX
            );
            crate::ensure!(
                end == all,
                operator,
                "KV head {head}: {name} add up to {end}, expected {all} as for KV head 0"
            );
        }
        Ok(Self { bounds, blocks, total: total.unwrap_or(0) })
    }

    /// Number of keys attended to by all `block_rows` block rows, summed over heads.
    fn count_keys(&self, blocks: &[bool], block_rows: usize) -> usize {
        let flags = blocks.iter().enumerate().filter(|(_, attended)| **attended).map(|(flag, _)| flag);
        let (columns, block_rows) = (self.blocks.max(1), block_rows.max(1));
        let keys = flags.map(|flag| self.range(flag / columns / block_rows, flag % columns).len());
        keys.fold(0, usize::saturating_add)
    }

    fn range(&self, head: usize, block: usize) -> Range<usize> {
        let first = head * (self.blocks + 1) + block;
        self.bounds[first]..self.bounds[first + 1]
    }
}

fn one_request(num_rows: usize, kv_len: usize) -> Vec<Request> {
    vec![Request { end: num_rows, offset: kv_len as i64 - num_rows as i64 }]
}
