//! The radix tree, behavior by behavior; `random` compares it with a naive model.

use tilewright_serve::{
    pages::PageId,
    radix::{NodeId, RadixTree},
};

mod model;
mod random;

const NO_PAGES: [PageId; 0] = [];

/// A tree with pages of two tokens and every path of `content`, inserted in order.
fn tree(content: &[(&[u32], &[PageId])]) -> RadixTree {
    let mut tree = RadixTree::new(2).unwrap();
    for (tokens, pages) in content {
        insert(&mut tree, tokens, pages);
    }
    tree
}

fn insert(tree: &mut RadixTree, tokens: &[u32], pages: &[PageId]) -> NodeId {
    let insertion = tree.insert(tokens, pages).unwrap();
    assert_eq!(insertion.duplicates, NO_PAGES);
    tree.check_integrity().unwrap();
    insertion.node
}

fn matched(tree: &mut RadixTree, tokens: &[u32]) -> Vec<PageId> {
    let prefix = tree.match_prefix(tokens);
    tree.check_integrity().unwrap();
    assert_eq!(prefix.num_tokens(), prefix.pages.len() * tree.page_size());
    prefix.pages
}

fn evicted(tree: &mut RadixTree, count: usize) -> Vec<PageId> {
    let pages = tree.evict(count);
    tree.check_integrity().unwrap();
    pages
}

fn error_of_insert(tree: &mut RadixTree, tokens: &[u32], pages: &[PageId]) -> String {
    let before = tree.to_string();
    let error = tree.insert(tokens, pages).unwrap_err();
    assert_eq!(tree.to_string(), before, "a failed insertion changed the tree");
    error.to_string()
}

#[test]
fn a_page_has_at_least_one_token() {
    let error = RadixTree::new(0).unwrap_err();
    assert_eq!(error.to_string(), "radix.new: page_size = 0 is not at least 1");
}

#[test]
fn the_longest_prefix_in_full_pages_is_matched() {
    let mut tree = tree(&[(&[1, 2, 3, 4], &[0, 1]), (&[1, 2, 3, 4, 5, 6], &[0, 1, 2])]);
    assert_eq!(matched(&mut tree, &[]), NO_PAGES);
    assert_eq!(matched(&mut tree, &[1]), NO_PAGES);
    assert_eq!(matched(&mut tree, &[1, 9]), NO_PAGES);
    assert_eq!(matched(&mut tree, &[1, 2, 3]), [0]);
    assert_eq!(matched(&mut tree, &[1, 2, 3, 4, 5]), [0, 1]);
    assert_eq!(matched(&mut tree, &[1, 2, 3, 4, 5, 6]), [0, 1, 2]);
    assert_eq!(matched(&mut tree, &[1, 2, 3, 4, 5, 6, 7, 8]), [0, 1, 2]);
}

#[test]
fn children_differ_in_their_first_page_not_their_first_token() {
    let mut tree = tree(&[(&[1, 2], &[0]), (&[1, 3], &[1]), (&[1, 4, 5, 6], &[2, 3])]);
    assert_eq!(matched(&mut tree, &[1, 2]), [0]);
    assert_eq!(matched(&mut tree, &[1, 3]), [1]);
    assert_eq!(matched(&mut tree, &[1, 4, 5, 7]), [2]);
    assert_eq!(matched(&mut tree, &[1, 5]), NO_PAGES);
}

#[test]
fn a_match_inside_an_edge_splits_it_and_the_old_id_keeps_its_path() {
    let mut tree = tree(&[]);
    let whole = insert(&mut tree, &[1, 1, 2, 2, 3, 3], &[0, 1, 2]);
    let head = tree.match_prefix(&[1, 1, 2, 2, 3, 4]);
    assert_eq!(head.pages, [0, 1]);
    assert_ne!(head.node, whole);
    assert_eq!(tree.match_prefix(&[1, 1, 2, 2, 3, 3]).node, whole);
    assert_eq!(tree.match_prefix(&[1, 1, 2, 2]).node, head.node);
    tree.lock(head.node).unwrap();
    assert_eq!(evicted(&mut tree, 9), [2]);
}

#[test]
fn an_insertion_that_ends_inside_an_edge_gets_a_node_of_its_own() {
    let mut tree = tree(&[(&[1, 1, 2, 2, 3, 3], &[0, 1, 2])]);
    let head = insert(&mut tree, &[1, 1], &[0]);
    assert_eq!(tree.match_prefix(&[1, 1]).node, head);
    assert_eq!(tree.num_pages(), 3);
}

#[test]
fn pages_with_tokens_that_the_tree_has_are_duplicates() {
    let mut tree = tree(&[(&[1, 1, 2, 2, 3, 3], &[0, 1, 2])]);
    let insertion = tree.insert(&[1, 1, 2, 2, 4, 4], &[0, 7, 8]).unwrap();
    assert_eq!(insertion.duplicates, [7]); // 0 is the tree's own, 8 is new
    assert_eq!(matched(&mut tree, &[1, 1, 2, 2, 4, 4]), [0, 1, 8]);
    assert_eq!(tree.num_pages(), 4);
}

#[test]
fn an_invalid_insertion_is_rejected_and_changes_nothing() {
    let mut tree = tree(&[(&[1, 1, 2, 2], &[0, 1])]);
    let text = "radix.insert: tokens.len() = 3 does not fill pages.len() = 2 of 2 tokens each";
    assert_eq!(error_of_insert(&mut tree, &[1, 1, 2], &[0, 1]), text);
    let text = "radix.insert: tokens.len() = 2 does not fill pages.len() = 2 of 2 tokens each";
    assert_eq!(error_of_insert(&mut tree, &[1, 1], &[0, 1]), text);
    let text = "radix.insert: pages[1] = 5 is given twice";
    assert_eq!(error_of_insert(&mut tree, &[8, 8, 9, 9], &[5, 5]), text);
    let text = "radix.insert: pages[0] = -1 is negative";
    assert_eq!(error_of_insert(&mut tree, &[8, 8], &[-1]), text);
    let text = "radix.insert: pages[1] = 1 is in the tree already, for other tokens";
    assert_eq!(error_of_insert(&mut tree, &[1, 1, 3, 3], &[0, 1]), text);
    let text = "radix.insert: pages[0] = 1 is in the tree already, for other tokens";
    assert_eq!(error_of_insert(&mut tree, &[1, 1], &[1]), text);
    assert_eq!(error_of_insert(&mut tree, &[1, 1, 2, 2], &[1, 0]), text);
    let text = "radix.insert: pages[2] = 0 is in the tree already, for other tokens";
    assert_eq!(error_of_insert(&mut tree, &[1, 1, 2, 2, 3, 3], &[0, 1, 0]), text);
}

#[test]
fn a_lock_protects_exactly_its_path() {
    let mut tree = tree(&[(&[1, 1, 2, 2, 4, 4], &[0, 1, 3])]);
    let locked = insert(&mut tree, &[1, 1, 2, 2, 3, 3], &[0, 1, 2]);
    tree.lock(locked).unwrap();
    tree.lock(locked).unwrap();
    assert_eq!((tree.num_pages(), tree.num_evictable()), (4, 1));
    assert_eq!(evicted(&mut tree, 9), [3]);
    tree.unlock(locked).unwrap();
    assert_eq!(evicted(&mut tree, 9), NO_PAGES);
    tree.unlock(locked).unwrap();
    assert_eq!(tree.num_evictable(), 3);
    assert_eq!(evicted(&mut tree, 9), [2, 1, 0]);
    assert_eq!((tree.num_pages(), tree.num_evictable()), (0, 0));
}

#[test]
fn a_split_of_a_locked_edge_keeps_both_parts_locked_until_the_unlock() {
    let mut tree = tree(&[]);
    let whole = insert(&mut tree, &[1, 1, 2, 2], &[0, 1]);
    tree.lock(whole).unwrap();
    let head = tree.match_prefix(&[1, 1]).node;
    assert_eq!(tree.num_evictable(), 0);
    let error = tree.unlock(head).unwrap_err(); // the lock was not on this node
    assert_eq!(error.to_string(), "radix.unlock: node 2 is not locked");
    tree.unlock(whole).unwrap();
    assert_eq!(evicted(&mut tree, 9), [1, 0]);
}

#[test]
fn the_root_can_be_locked_by_a_request_that_matched_nothing() {
    let mut tree = tree(&[(&[1, 1], &[0])]);
    let root = tree.match_prefix(&[7, 7]).node;
    tree.lock(root).unwrap();
    assert_eq!(evicted(&mut tree, 1), [0]);
    tree.unlock(root).unwrap();
    assert_eq!(tree.unlock(root).unwrap_err().to_string(), "radix.unlock: node 0 is not locked");
}

#[test]
fn the_least_recently_used_pages_are_evicted_first() {
    let mut tree = tree(&[(&[1, 1], &[0]), (&[2, 2], &[1]), (&[3, 3], &[2])]);
    matched(&mut tree, &[1, 1]);
    insert(&mut tree, &[2, 2], &[1]);
    assert_eq!(evicted(&mut tree, 1), [2]);
    assert_eq!(evicted(&mut tree, 1), [0]);
    assert_eq!(evicted(&mut tree, 1), [1]);
}

#[test]
fn a_parent_is_evicted_after_its_last_child() {
    let mut tree = tree(&[(&[1, 1, 2, 2], &[0, 1]), (&[1, 1, 3, 3], &[0, 2]), (&[4, 4], &[3])]);
    assert_eq!(evicted(&mut tree, 3), [1, 2, 0]);
    assert_eq!(matched(&mut tree, &[4, 4]), [3]);
}

#[test]
fn eviction_trims_the_last_leaf_to_the_exact_count() {
    let mut tree = tree(&[(&[1, 1, 2, 2, 3, 3], &[0, 1, 2]), (&[4, 4], &[3])]);
    assert_eq!(evicted(&mut tree, 0), NO_PAGES);
    assert_eq!(evicted(&mut tree, 2), [2, 1]);
    assert_eq!(matched(&mut tree, &[1, 1, 2, 2, 3, 3]), [0]);
    assert_eq!(evicted(&mut tree, 2), [3, 0]);
}

#[test]
fn a_stale_id_is_rejected_even_after_reinsertion() {
    let mut tree = tree(&[]);
    let old = insert(&mut tree, &[1, 1, 2, 2], &[0, 1]);
    assert_eq!(evicted(&mut tree, 1), [1]);
    let text = "radix.lock: node 1 is not, or no longer, in the tree";
    assert_eq!(tree.lock(old).unwrap_err().to_string(), text);
    let new = insert(&mut tree, &[1, 1, 2, 2], &[0, 5]);
    assert_ne!(new, old);
    assert_eq!(tree.lock(old).unwrap_err().to_string(), text);
    let text = "radix.unlock: node 1 is not, or no longer, in the tree";
    assert_eq!(tree.unlock(old).unwrap_err().to_string(), text);
    tree.lock(new).unwrap();
}

#[test]
fn an_id_of_another_tree_is_rejected() {
    let mut other = tree(&[(&[1, 1], &[0]), (&[2, 2], &[1])]);
    let foreign = other.match_prefix(&[2, 2]).node;
    let text = "radix.lock: node 2 is not, or no longer, in the tree";
    assert_eq!(tree(&[]).lock(foreign).unwrap_err().to_string(), text);
}

#[test]
fn display_sorts_siblings_and_truncates_long_lists() {
    let mut tree = tree(&[(&[5, 6], &[9]), (&[1, 2, 3, 4, 5, 6, 7, 8, 9, 10], &[0, 1, 2, 3, 4])]);
    matched(&mut tree, &[1, 2]);
    let expected = "\
root: 6 pages of 2 tokens, 6 evictable, locks 0 of 0, used at 3
├── node 3: tokens [1 2], pages [0], locks 0 of 0, used at 3
│   └── node 2: tokens [3 4 5 6 7 8 9 10], pages [1 2 3 4], locks 0 of 0, used at 2
└── node 1: tokens [5 6], pages [9], locks 0 of 0, used at 1
";
    assert_eq!(tree.to_string(), expected);
    let pages: Vec<PageId> = (10..15).collect();
    let drawn = self::tree(&[(&[1; 10], &pages)]).to_string();
    assert!(drawn.contains("tokens [1 1 1 1 1 1 1 1 … 2 more]"), "{drawn}");
}
