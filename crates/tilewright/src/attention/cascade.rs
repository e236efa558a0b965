//! Cascade attention: keys shared by several requests are segments of their own, read once for all of them.
//!
//! ```text
//! requests   0   1   2   3        level 0: one group, the system prompt of all four
//! level 0    [ 0 1 2 3    ]       level 1: two groups, each with a document of its own
//! level 1    [ 0 1 ][ 2 3 ]       own:     each request's private keys
//! own        [0][1][2][3]         a row merges the states of its three segments
//! ```

use super::{
    batch::Level,
    requests::{KvSource, Requests, Segment},
    schedule::Tiling,
};
use crate::{Error, Result, kv::PageList};
use std::{fmt, ops::Range};

impl Requests {
    /// Inserts the segments of `levels` before the requests' own. Returns the total number of keys per request.
    pub(super) fn add_levels(&mut self, operator: &'static str, levels: &[Level<'_>]) -> Result<Vec<usize>> {
        // per request, its number of keys in the levels so far
        let mut bases = vec![0_usize; self.segments.len()];
        let mut shared = Vec::new();
        for (l, level) in levels.iter().enumerate() {
            let segments = self.add_level(operator, level, &mut bases);
            let text = |error: Error| Error::new(operator, format!("level {l}: {}", error.message()));
            shared.extend(segments.map_err(text)?);
        }
        for (own, base) in self.segments.iter_mut().zip(&bases) {
            (own.base, own.shared) = (*base, *base > 0);
        }
        let kv_lens = self.segments.iter().map(|own| own.base.saturating_add(own.kv_len)).collect();
        shared.append(&mut self.segments);
        self.segments = shared;
        Ok(kv_lens)
    }

    /// The segments of one level; appends its pages to the table.
    fn add_level(
        &mut self,
        operator: &'static str,
        level: &Level<'_>,
        bases: &mut [usize],
    ) -> Result<Vec<Segment>> {
        let (pages, page_size) = (level.table.resolve_of(operator, "group")?, level.table.page_size);
        let groups = level.qo_indptr.ranges_of(operator, "qo_indptr", "group", pages.ranges.len())?;
        let end = groups.last().map_or(0, |qo| qo.end);
        let rows = self.segments.last().map_or(0, |own| own.qo.end);
        crate::ensure!(end <= rows, operator, "qo_indptr ends at {end}, the batch has {rows} query rows");
        let mut segments = Vec::new();
        for (g, (qo, kv_len)) in groups.into_iter().zip(pages.kv_lens).enumerate() {
            let error = |text: String| Err(Error::new(operator, format!("group {g}: {text}")));
            if kv_len % page_size != 0 {
                return error(format!(
                    "last_page_len = {}, expected full pages of {page_size}",
                    kv_len % page_size
                ));
            }
            if kv_len == 0 || qo.is_empty() {
                continue;
            }
            let first = self.segments.partition_point(|own| own.qo.end <= qo.start);
            let last = self.segments.partition_point(|own| own.qo.start < qo.end);
            let members = first..last;
            if let Some(r) = members.clone().find(|&r| splits_request(&qo, &self.segments[r].qo)) {
                return error(format!(
                    "rows {qo:?} cut request {r}, which has rows {:?}",
                    self.segments[r].qo
                ));
            }
            let base = bases[first];
            let has_rows = |r: &usize| !self.segments[*r].qo.is_empty();
            if let Some(r) = members.clone().filter(has_rows).find(|&r| bases[r] != base) {
                let other = bases[r];
                return error(format!(
                    "requests {first} and {r} have {base} and {other} keys in earlier levels"
                ));
            }
            bases[members].fill(base.saturating_add(kv_len));
            let (kv_start, kv_heads) = (pages.ranges[g].start, self.segments[first].kv_heads.clone());
            let segment =
                Segment { qo, kv_heads, kv_start, kv_len, base, request: None, shared: true, mask: None };
            segments.push(segment);
        }
        let first = self.append_pages(operator, (pages.indices, page_size, pages.max_page))?;
        segments.iter_mut().for_each(|segment| segment.kv_start += first);
        Ok(segments)
    }

    /// Appends pages to the table and returns the index of the first.
    fn append_pages(&mut self, operator: &'static str, pages: (PageList, usize, i32)) -> Result<usize> {
        let KvSource::Paged { indices, page_size, max_page } = &mut self.source else {
            return Err(Error::new(operator, "keys in pages, but those of the batch are ragged"));
        };
        crate::ensure!(pages.1 == *page_size, operator, "page_size = {}, the batch has {page_size}", pages.1);
        let first = indices.num_indices();
        indices.append(&pages.0);
        *max_page = pages.2.max(*max_page);
        Ok(first)
    }
}

/// Whether `group` contains some but not all rows of a request.
fn splits_request(group: &Range<usize>, request: &Range<usize>) -> bool {
    let common = group.start.max(request.start)..group.end.min(request.end);
    !common.is_empty() && common != *request
}

/// A page prefix shared by adjacent requests, with the cost estimate that decides whether it becomes a level.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SharedPrefix {
    /// The requests.
    pub requests: Range<usize>,
    /// Positions of the shared tokens in each request.
    pub tokens: Range<usize>,
    /// Cost of these keys without a level, summed over the requests, in query tokens times KV tiles: see
    /// [`Tiling::cost`].
    pub cost_alone: usize,
    /// Cost as a level, including its overhead and the merge of its rows.
    pub cost_shared: usize,
}

impl SharedPrefix {
    /// Whether the prefix became a level.
    pub fn is_level(&self) -> bool {
        self.cost_shared < self.cost_alone
    }

    fn estimate(
        requests: Range<usize>,
        tokens: Range<usize>,
        own: &[Segment],
        cost_model: CostModel<'_>,
    ) -> Self {
        let CostModel { tiling, tile_tokens, group } = cost_model;
        let heads = own[0].kv_heads.len();
        let per_tile = |rows: usize| heads * (tiling.tile_load * rows.div_ceil(tile_tokens) + rows);
        let rows = own[requests.clone()].iter().map(|own| own.qo.len());
        let (alone, all) = (rows.clone().map(per_tile).sum::<usize>(), rows.sum::<usize>());
        let tiles = tokens.len().div_ceil(tiling.kv_tokens);
        // writing and reading back the two states of a row costs about as much as two KV tiles
        let merging = 2 * heads * all;
        let own_kernel = tiling.many_rows.filter(|many| many.contains(group, all));
        let overhead =
            own_kernel.map_or(0, |many| many.level_overhead * tiling.workers * tiling.cost_per_tile(1, 1));
        Self {
            requests,
            tokens,
            cost_alone: alone.saturating_mul(tiles),
            cost_shared: per_tile(all)
                .saturating_mul(tiles + tiling.segment_overhead)
                .saturating_add(merging + overhead),
        }
    }
}

impl fmt::Display for SharedPrefix {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { requests, tokens, cost_alone, cost_shared } = self;
        let decision = if self.is_level() { "a level" } else { "not worth a level" };
        write!(
            f,
            "requests {requests:?} share tokens {tokens:?}: {decision}, cost {cost_shared} as one against {cost_alone} alone"
        )
    }
}

/// Parameters of the cost estimate.
#[derive(Clone, Copy)]
pub(super) struct CostModel<'a> {
    pub(super) tiling: &'a Tiling,
    /// Query tokens per tile.
    pub(super) tile_tokens: usize,
    /// Query heads per KV head.
    pub(super) group: usize,
}

impl Requests {
    /// Turns page prefixes shared by adjacent requests into levels where that lowers the estimated cost.
    ///
    /// Prefixes form a tree: all requests of a node share its pages, and those of a child share more. A rejected node
    /// leaves its pages to its children.
    pub(super) fn share_prefixes(&mut self, cost_model: CostModel<'_>) -> Vec<SharedPrefix> {
        let common = self.common_pages();
        let KvSource::Paged { page_size, .. } = self.source else { return Vec::new() };
        let (mut prefixes, mut shared) = (Vec::new(), Vec::new());
        // pending nodes: requests, and the position up to which levels hold their keys
        let mut nodes = vec![(0..self.segments.len(), 0)];
        while let Some((requests, base)) = nodes.pop() {
            if requests.len() < 2 {
                continue;
            }
            let common_of_node = &common[requests.start..requests.end - 1];
            let pages = common_of_node.iter().copied().min().unwrap_or(0);
            let mut level_end = base;
            let rows = self.segments[requests.start].qo.start..self.segments[requests.end - 1].qo.end;
            if pages * page_size > base && !rows.is_empty() {
                let tokens = base..pages * page_size;
                let prefix =
                    SharedPrefix::estimate(requests.clone(), tokens.clone(), &self.segments, cost_model);
                if prefix.is_level() {
                    level_end = tokens.end;
                    let first = &self.segments[requests.start];
                    let (kv_heads, kv_start, kv_len) = (first.kv_heads.clone(), first.kv_start, tokens.len());
                    let (qo, request, mask) = (rows, None, None);
                    shared.push(Segment {
                        qo,
                        kv_heads,
                        kv_start,
                        kv_len,
                        base,
                        request,
                        shared: true,
                        mask,
                    });
                }
                prefixes.push(prefix);
            }
            let mut begin = requests.start;
            let ends = common_of_node
                .iter()
                .zip(requests.start + 1..)
                .filter(|(common, _)| **common == pages)
                .map(|(_, end)| end);
            let children: Vec<usize> = ends.chain([requests.end]).collect();
            for end in children {
                nodes.push((begin..end, level_end));
                begin = end;
            }
            self.segments[requests].iter_mut().for_each(|own| own.drop_prefix(level_end, page_size));
        }
        shared.append(&mut self.segments);
        self.segments = shared;
        prefixes
    }

    /// For each request except the last: the number of full pages, none of them masked, shared with the next request.
    fn common_pages(&self) -> Vec<usize> {
        let KvSource::Paged { indices, page_size, .. } = &self.source else { return Vec::new() };
        let unmasked = |own: &Segment| {
            let tokens = own.kv_len - own.mask.map_or(0, |mask| mask.columns);
            &indices[own.kv_start..own.kv_start + tokens / page_size]
        };
        let common = |pair: &[Segment]| {
            let (a, b) = (unmasked(&pair[0]), unmasked(&pair[1]));
            a.iter().zip(b).take_while(|(a, b)| a == b).count()
        };
        self.segments.windows(2).map(common).collect()
    }
}

impl Segment {
    /// Removes the keys before position `level_end` (full pages), which levels hold.
    fn drop_prefix(&mut self, level_end: usize, page_size: usize) {
        let dropped = level_end - self.base;
        self.base = level_end;
        self.kv_start += dropped / page_size;
        self.kv_len -= dropped;
        self.shared = level_end > 0;
    }
}
