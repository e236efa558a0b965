//! One step's batch, as operators take it: the chosen tokens of all requests end to end, and their page table.

use crate::scheduler::{Chunk, Scheduler};
use std::sync::Arc;
use tilewright::{Batch, PageTable};

/// The tokens of a step. Ragged: chunk `c` owns rows `qo_indptr[c]..qo_indptr[c + 1]`.
#[derive(Debug, Default)]
pub(crate) struct Step {
    /// `[rows]`
    pub(crate) tokens: Vec<i32>,
    /// `[rows]`: position of each token in its request.
    pub(crate) positions: Vec<i32>,
    /// `[rows]`: chunk of each token.
    pub(crate) batch_indices: Vec<i32>,
    /// Rows whose logits are wanted: the last of each request that is computed up to its end.
    pub(crate) wanted_rows: Vec<i32>,
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
                step.wanted_rows.push(step.tokens.len() as i32 - 1);
            }
            let kv_len = chunk.tokens.end;
            let pages = kv_len.div_ceil(page_size);
            indices.extend(&request.holding.pages[..pages]);
            step.kv_indptr.push(indices.len() as i32);
            step.last_page_len.push((kv_len - (pages - 1) * page_size) as i32);
        }
        step.indices = Arc::new(indices);
        step
    }

    /// One text from its first token on, in pages of its own, with the logits of every row wanted.
    pub(crate) fn whole(tokens: &[u32], page_size: usize) -> Self {
        let (rows, pages) = (tokens.len() as i32, tokens.len().div_ceil(page_size));
        Self {
            tokens: tokens.iter().map(|&token| token as i32).collect(),
            positions: (0..rows).collect(),
            batch_indices: vec![0; tokens.len()],
            wanted_rows: (0..rows).collect(),
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

    /// Whether the logits of all rows are wanted.
    pub(crate) fn all_wanted(&self) -> bool {
        self.wanted_rows.len() == self.rows()
    }

    /// Whether every request has one token here, its last.
    pub(crate) fn is_decode(&self) -> bool {
        self.all_wanted() && self.qo_indptr.len() == self.rows() + 1
    }

    /// Pages of all requests together, and keys of the longest.
    pub(crate) fn longest(&self) -> (usize, usize) {
        let pages = self.kv_indptr.windows(2).map(|pages| (pages[1] - pages[0]) as usize);
        (self.indices.len(), pages.max().unwrap_or(0) * self.page_size)
    }

    /// Whether there are no more pages and keys than these.
    pub(crate) fn fits(&self, pages: usize, kv_len: usize) -> bool {
        let longest = self.longest();
        longest.0 <= pages && longest.1 <= kv_len
    }

    /// Adds tokens up to `rows` that belong to nobody: they are appended nowhere, look at nothing, and what comes of them is not
    /// looked at.
    pub(crate) fn pad(&mut self, rows: usize) {
        let wanted = self.rows() as i32..rows as i32;
        self.tokens.resize(rows, 0);
        self.positions.resize(rows, 0);
        self.batch_indices.resize(rows, -1);
        self.wanted_rows.extend(wanted);
    }

    /// Who owns which pages, this step's tokens included.
    pub(crate) fn table(&self) -> PageTable<'_> {
        PageTable::new(&self.kv_indptr, &self.indices, &self.last_page_len, self.page_size)
    }

    /// The batch to plan.
    pub(crate) fn batch(&self) -> Batch<'_> {
        Batch::paged(&self.qo_indptr, self.table())
    }
}
