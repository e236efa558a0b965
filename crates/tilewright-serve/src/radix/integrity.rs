//! Integrity check of the whole tree.
//!
//! Invariant: cached values are recomputed, not trusted. A damaged tree gives an error, never a panic or an endless loop:
//! a second path to a node contradicts that node's parent link or its key.

use super::{ROOT, RadixTree, slab::Node};
use crate::pages::PageId;
use std::collections::{BTreeSet, HashSet};
use tilewright::{Error, Result, ensure};

const OPERATOR: &str = "radix.check_integrity";

/// Totals over all nodes, compared with the tree's cached values.
#[derive(Default)]
struct Totals {
    num_nodes: usize,
    num_evictable: usize,
    pages: HashSet<PageId>,
    candidates: BTreeSet<(u64, usize)>,
}

impl RadixTree {
    /// Checks every invariant of the tree (the module lists them), in time linear in its tokens.
    ///
    /// # Errors
    /// With the first violated invariant and its node or page.
    pub fn check_integrity(&self) -> Result<()> {
        self.nodes.check(OPERATOR)?;
        self.check_root()?;
        let mut totals = Totals::default();
        let mut stack = vec![(ROOT, &self.nodes[ROOT])];
        while let Some((index, node)) = stack.pop() {
            let mut path_locks = node.own_locks;
            for (key, &child) in &node.children {
                let child_node = self.check_child(index, key, child)?;
                path_locks += child_node.path_locks;
                stack.push((child, child_node));
            }
            ensure!(
                node.path_locks == path_locks,
                OPERATOR,
                "node {index} counts {} path locks, but its own and its children's are {path_locks}",
                node.path_locks
            );
            totals.add(index, node)?;
        }
        self.check_totals(&totals)
    }

    fn check_root(&self) -> Result<()> {
        let root = self.nodes.get(ROOT).ok_or_else(|| Error::new(OPERATOR, "there is no root"))?;
        ensure!(root.parent.is_none(), OPERATOR, "the root has a parent");
        ensure!(root.tokens.is_empty() && root.pages.is_empty(), OPERATOR, "the root has an edge");
        Ok(())
    }

    /// Checks `child` of node `index` under `key` and returns it.
    fn check_child(&self, index: usize, key: &[u32], child: usize) -> Result<&Node> {
        let Some(node) = self.nodes.get(child) else {
            return Err(Error::new(OPERATOR, format!("node {index} has the child {child}, which is vacant")));
        };
        ensure!(
            node.parent == Some(index),
            OPERATOR,
            "node {child} is a child of node {index}, but its parent is {:?}",
            node.parent
        );
        let (num_pages, num_tokens) = (node.pages.len(), node.tokens.len());
        ensure!(num_pages > 0, OPERATOR, "node {child} has no pages");
        ensure!(
            num_tokens == num_pages * self.page_size,
            OPERATOR,
            "node {child} has {num_tokens} tokens for {num_pages} pages of {}",
            self.page_size
        );
        ensure!(
            key == &node.tokens[..self.page_size],
            OPERATOR,
            "node {child} hangs under node {index} by tokens that are not those of its first page"
        );
        let (newer, older) = (node.last_access, self.nodes[index].last_access);
        ensure!(newer <= older, OPERATOR, "node {child} was used at {newer}, after its parent at {older}");
        Ok(node)
    }

    fn check_totals(&self, totals: &Totals) -> Result<()> {
        let (reachable, all) = (totals.num_nodes, self.nodes.num_nodes());
        ensure!(reachable == all, OPERATOR, "{reachable} of {all} nodes can be reached from the root");
        let strays = totals.pages.symmetric_difference(&self.pages).count();
        ensure!(strays == 0, OPERATOR, "{strays} pages are only in the set of pages or only in the nodes");
        let strays: Vec<_> = totals.candidates.symmetric_difference(&self.candidates).collect();
        ensure!(
            strays.is_empty(),
            OPERATOR,
            "the candidates for eviction and the unlocked leaves differ in {strays:?}"
        );
        let (counted, kept) = (totals.num_evictable, self.num_evictable);
        ensure!(counted == kept, OPERATOR, "num_evictable is {kept}, but {counted} pages are unlocked");
        Ok(())
    }
}

impl Totals {
    fn add(&mut self, index: usize, node: &Node) -> Result<()> {
        self.num_nodes += 1;
        for &page in &node.pages {
            ensure!(page >= 0, OPERATOR, "node {index} has the negative page {page}");
            ensure!(self.pages.insert(page), OPERATOR, "page {page} is in the tree twice");
        }
        if node.path_locks == 0 {
            self.num_evictable += node.pages.len();
        }
        if node.is_candidate() {
            self.candidates.insert((node.last_access, index));
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::{super::NodeId, *};

    fn put(tree: &mut RadixTree, tokens: &[u32], pages: &[PageId]) -> NodeId {
        tree.insert(tokens, pages).unwrap().node
    }

    /// Node 1 is the edge [1 1 2 2] with pages [0 1]. Its children are node 2, [3 3] with page 2, locked, and node 3,
    /// [4 4] with page 3, the only candidate.
    fn tree() -> RadixTree {
        let mut tree = RadixTree::new(2).unwrap();
        put(&mut tree, &[1, 1, 2, 2], &[0, 1]);
        let locked = put(&mut tree, &[1, 1, 2, 2, 3, 3], &[0, 1, 2]);
        put(&mut tree, &[1, 1, 2, 2, 4, 4], &[0, 1, 3]);
        tree.lock(locked).unwrap();
        tree
    }

    fn link_child(tree: &mut RadixTree, parent: usize, key: [u32; 2], child: usize) {
        tree.nodes[parent].children.insert(key.into(), child);
    }

    fn error_after(damage: impl Fn(&mut RadixTree)) -> String {
        let mut tree = tree();
        tree.check_integrity().unwrap();
        damage(&mut tree);
        tree.check_integrity().unwrap_err().message().to_owned()
    }

    #[test]
    fn damaged_links_are_found() {
        assert_eq!(error_after(|t| t.nodes[0].parent = Some(1)), "the root has a parent");
        assert_eq!(error_after(|t| t.nodes[0].pages.push(9)), "the root has an edge");
        assert_eq!(
            error_after(|t| t.nodes[3].parent = Some(2)),
            "node 3 is a child of node 1, but its parent is Some(2)"
        );
        assert_eq!(error_after(|t| link_child(t, 2, [8, 8], 9)), "node 2 has the child 9, which is vacant");
        let text = "node 3 hangs under node 1 by tokens that are not those of its first page";
        assert_eq!(error_after(|t| link_child(t, 1, [5, 5], 3)), text);
        let text = "3 of 4 nodes can be reached from the root";
        assert_eq!(error_after(|t| t.nodes[1].children.retain(|_, &mut child| child != 3)), text);
    }

    #[test]
    fn damaged_edges_are_found() {
        assert_eq!(error_after(|t| t.nodes[3].pages.clear()), "node 3 has no pages");
        assert_eq!(error_after(|t| t.nodes[3].tokens.push(4)), "node 3 has 3 tokens for 1 pages of 2");
        assert_eq!(error_after(|t| t.nodes[3].pages[0] = -1), "node 3 has the negative page -1");
        assert_eq!(error_after(|t| t.nodes[1].pages[0] = 1), "page 1 is in the tree twice");
        let text = "2 pages are only in the set of pages or only in the nodes";
        assert_eq!(error_after(|t| t.nodes[3].pages[0] = 7), text);
    }

    #[test]
    fn damaged_counts_are_found() {
        let text = "node 2 counts 1 path locks, but its own and its children's are 0";
        assert_eq!(error_after(|t| t.nodes[2].own_locks = 0), text);
        let text = "node 0 counts 1 path locks, but its own and its children's are 0";
        assert_eq!(error_after(|t| t.nodes[1].path_locks = 0), text);
        assert_eq!(
            error_after(|t| t.nodes[3].last_access = 9),
            "node 3 was used at 9, after its parent at 3"
        );
        let text = "the candidates for eviction and the unlocked leaves differ in [(3, 3)]";
        assert_eq!(error_after(|t| t.candidates.clear()), text);
        assert_eq!(error_after(|t| t.num_evictable = 2), "num_evictable is 2, but 1 pages are unlocked");
    }
}
