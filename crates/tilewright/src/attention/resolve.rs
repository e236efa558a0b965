//! From a batch, as the caller has it, to checked requests.

use super::{
    batch::{Batch, KvTable, Levels, Shard},
    mask::{MaskBits, PackedMask},
    problem::Problem,
    requests::{KvSource, Request, Requests, Segment, SegmentMask},
};
use crate::Result;

impl Batch<'_> {
    /// Checks everything about the batch and puts it into the form that schedules and kernels read.
    pub(super) fn resolve(&self, operator: &'static str, problem: &Problem) -> Result<Requests> {
        let requests = match &self.kv {
            KvTable::Blocks(blocks) => blocks.resolve(operator, problem),
            KvTable::VariableBlocks(blocks) => blocks.resolve(operator, problem),
            KvTable::Paged(_) | KvTable::Ragged { .. } => return self.resolve_requests(operator, problem),
        }?;
        let refused = [
            ("packed mask", self.mask.is_some()),
            ("levels", !matches!(self.levels, Levels::Given([]))),
            ("shard", self.shard.is_some()),
        ];
        for (what, given) in refused {
            crate::ensure!(!given, operator, "a block-sparse batch takes no {what}");
        }
        Ok(requests)
    }

    fn resolve_requests(&self, operator: &'static str, problem: &Problem) -> Result<Requests> {
        let count = self.qo_indptr.len().saturating_sub(1);
        let qo = self.qo_indptr.ranges(operator, "qo_indptr", count)?;
        let (kv, source) = self.keys(operator, count)?;
        crate::ensure!(
            kv.len() == count,
            operator,
            "the page table has {} requests, qo_indptr has {count}",
            kv.len()
        );
        let segment = |(r, (qo, (kv_start, kv_len)))| Segment {
            qo,
            kv_heads: 0..problem.heads().kv,
            kv_start,
            kv_len,
            base: 0,
            request: Some(r as u32),
            shared: false,
            mask: None,
        };
        let own: Vec<Segment> = qo.into_iter().zip(kv).enumerate().map(segment).collect();
        crate::ensure!(
            !self.finds_levels() || matches!(source, KvSource::Paged { .. }),
            operator,
            "shared prefixes are found by their pages, but the keys are ragged"
        );
        check_counts(operator, &own, own.iter().map(|own| own.kv_len))?;
        let mut requests =
            Requests { requests: Vec::new(), segments: own, source, mask: MaskBits::default() };
        if let Some(mask) = &self.mask {
            requests.apply_mask(operator, mask)?;
        }
        if let Some(shard) = &self.shard {
            crate::ensure!(
                matches!(self.levels, Levels::Given([])),
                operator,
                "a batch with a shard takes no levels"
            );
            return requests.with_shard(operator, shard);
        }
        let given = if let Levels::Given(levels) = self.levels { levels } else { &[] };
        let kv_lens = requests.add_levels(operator, given)?;
        requests.set_rows(operator, &kv_lens)?;
        Ok(requests)
    }

    /// First entry and length of each request's own keys.
    fn keys(&self, operator: &'static str, count: usize) -> Result<(Vec<(usize, usize)>, KvSource)> {
        match self.kv {
            KvTable::Paged(table) => {
                let pages = table.resolve(operator)?;
                let kv = pages.ranges.iter().map(|r| r.start).zip(pages.kv_lens).collect();
                let (indices, page_size) = (pages.indices, table.page_size);
                Ok((kv, KvSource::Paged { indices, page_size, max_page: pages.max_page }))
            }
            KvTable::Ragged { indptr } => {
                let tokens = indptr.ranges(operator, "kv_indptr", count)?;
                let total = tokens.last().map_or(0, |r| r.end);
                Ok((tokens.iter().map(|r| (r.start, r.len())).collect(), KvSource::Ragged { tokens: total }))
            }
            KvTable::Blocks(_) | KvTable::VariableBlocks(_) => unreachable!("blocks resolve themselves"),
        }
    }
}

/// Positions are 32-bit, so that no product of rows and keys overflows 64.
fn check_counts(operator: &'static str, own: &[Segment], kv_lens: impl Iterator<Item = usize>) -> Result<()> {
    let total = own.last().map_or(0, |own| own.qo.end);
    let longest = kv_lens.max().unwrap_or(0);
    crate::ensure!(
        total.max(longest) <= i32::MAX as usize,
        operator,
        "{total} query rows and a longest request of {longest} tokens, the most is {}",
        i32::MAX
    );
    Ok(())
}

impl Requests {
    /// Lets the last query row of each request stand at the last of its `kv_lens` keys.
    fn set_rows(&mut self, operator: &'static str, kv_lens: &[usize]) -> Result<()> {
        let own = &self.segments[self.segments.len() - kv_lens.len()..];
        check_counts(operator, own, kv_lens.iter().copied())?;
        let request = |(own, &kv_len): (&Segment, &usize)| Request {
            end: own.qo.end,
            offset: kv_len as i64 - own.qo.end as i64,
        };
        self.requests = own.iter().zip(kv_lens).map(request).collect();
        Ok(())
    }

    fn with_shard(mut self, operator: &'static str, shard: &Shard<'_>) -> Result<Self> {
        let count = self.segments.len();
        for (name, index) in [("kv_offsets", shard.kv_offsets), ("kv_lens", shard.kv_lens)] {
            crate::ensure!(
                index.len() == count,
                operator,
                "{name} has {} entries, expected num_requests = {count}",
                index.len()
            );
        }
        let mut ends = Vec::with_capacity(count);
        for (r, own) in self.segments.iter_mut().enumerate() {
            let (offset, kv_len) = (shard.kv_offsets.get(r), shard.kv_lens.get(r));
            let fits = offset >= 0
                && kv_len >= 0
                && offset.checked_add(own.kv_len as i64).is_some_and(|end| end <= kv_len);
            crate::ensure!(
                fits,
                operator,
                "request {r}: kv_offset = {offset} and {} keys here do not lie in 0..{kv_len}",
                own.kv_len
            );
            own.base = offset as usize;
            ends.push(kv_len as usize);
        }
        self.set_rows(operator, &ends)?;
        Ok(self)
    }

    fn apply_mask(&mut self, operator: &'static str, mask: &PackedMask<'_>) -> Result<()> {
        let columns = mask.columns(operator, &self.segments)?;
        let mut bits = 0;
        for (segment, columns) in self.segments.iter_mut().zip(columns) {
            segment.mask = Some(SegmentMask { first_bit: bits, columns });
            bits = (bits + segment.qo.len() * columns).next_multiple_of(8);
        }
        self.mask = MaskBits::new(operator, mask, bits / 8)?;
        Ok(())
    }
}
