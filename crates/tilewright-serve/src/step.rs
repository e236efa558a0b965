//! The batch of one step: ragged tokens of all chunks, and their page table.

use crate::scheduler::{Chunk, Scheduler};
use std::sync::Arc;
use tilewright::{Batch, PageTable};

/// The ragged batch of a step: chunk `c` owns rows `qo_indptr[c]..qo_indptr[c + 1]`.
#[derive(Debug, Default)]
pub(crate) struct Step {
    /// `[rows]`
    pub(crate) tokens: Vec<i32>,
    /// `[rows]`: position of each token in its request.
    pub(crate) positions: Vec<i32>,
    /// `[rows]`: chunk of each token.
    pub(crate) batch_indices: Vec<i32>,
    /// Rows for which logits are computed: the last row of each fully computed request.
    pub(crate) logit_rows: Vec<i32>,
    qo_indptr: Vec<i32>,
    kv_indptr: Vec<i32>,
    /// Shared with the step's plan.
    indices: Arc<Vec<i32>>,
    last_page_len: Vec<i32>,
    page_size: usize,
}

impl Step {
    pub(crate) fn new(scheduler: &Scheduler, chunks: &[Chunk], page_size: usize) -> Self {
        let mut step = Self { page_size, qo_indptr: vec![0], kv_indptr: vec![0], ..Self::default() };
        let mut indices = Vec::new();
        for (index, chunk) in chunks.iter().enumerate() {
            let request = &scheduler.running[chunk.request];
            step.tokens.extend(request.tokens[chunk.tokens.clone()].iter().map(|&token| token as i32));
            step.positions.extend(chunk.tokens.clone().map(|position| position as i32));
            step.batch_indices.extend(chunk.tokens.clone().map(|_| index as i32));
            step.qo_indptr.push(step.tokens.len() as i32);
            if chunk.tokens.end == request.tokens.len() {
                step.logit_rows.push(step.tokens.len() as i32 - 1);
            }
            let kv_len = chunk.tokens.end;
            let pages = kv_len.div_ceil(page_size);
            indices.extend(&request.pages.ids[..pages]);
            step.kv_indptr.push(indices.len() as i32);
            step.last_page_len.push((kv_len - (pages - 1) * page_size) as i32);
        }
        step.indices = Arc::new(indices);
        step
    }

    /// A single sequence from its first token, in pages `0..`, with logits for every row.
    pub(crate) fn single_sequence(tokens: &[u32], page_size: usize) -> Self {
        let (rows, pages) = (tokens.len() as i32, tokens.len().div_ceil(page_size));
        Self {
            tokens: tokens.iter().map(|&token| token as i32).collect(),
            positions: (0..rows).collect(),
            batch_indices: vec![0; tokens.len()],
            logit_rows: (0..rows).collect(),
            qo_indptr: vec![0, rows],
            kv_indptr: vec![0, pages as i32],
            indices: Arc::new((0..pages as i32).collect()),
            last_page_len: vec![rows - ((pages - 1) * page_size) as i32],
            page_size,
        }
    }

    /// Number of tokens.
    pub(crate) fn rows(&self) -> usize {
        self.tokens.len()
    }

    /// Whether logits are computed for every row.
    pub(crate) fn all_logits(&self) -> bool {
        self.logit_rows.len() == self.rows()
    }

    /// Whether every request has exactly one token, its last.
    pub(crate) fn is_decode(&self) -> bool {
        self.all_logits() && self.qo_indptr.len() == self.rows() + 1
    }

    /// Total pages of all requests, and an upper bound on the keys of the longest.
    pub(crate) fn kv_extent(&self) -> (usize, usize) {
        let pages = self.kv_indptr.windows(2).map(|pages| (pages[1] - pages[0]) as usize);
        (self.indices.len(), pages.max().unwrap_or(0) * self.page_size)
    }

    /// Whether the step needs at most `pages` pages and `kv_len` keys.
    pub(crate) fn fits(&self, pages: usize, kv_len: usize) -> bool {
        let extent = self.kv_extent();
        extent.0 <= pages && extent.1 <= kv_len
    }

    /// Pads the batch to `rows` tokens: padding rows append no KV, attend to no key, and their logits are ignored.
    pub(crate) fn pad(&mut self, rows: usize) {
        let padding = self.rows() as i32..rows as i32;
        self.tokens.resize(rows, 0);
        self.positions.resize(rows, 0);
        self.batch_indices.resize(rows, -1);
        self.logit_rows.extend(padding);
    }

    /// The page table, this step's tokens included.
    pub(crate) fn table(&self) -> PageTable<'_> {
        PageTable::new(&self.kv_indptr, &self.indices, &self.last_page_len, self.page_size)
    }

    /// The batch to plan.
    pub(crate) fn batch(&self) -> Batch<'_> {
        Batch::paged(&self.qo_indptr, self.table())
    }
}
