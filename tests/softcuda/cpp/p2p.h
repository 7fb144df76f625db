// The order of sends and receives that NCCL demands. gloo, which carries the bytes here, takes them in any order.
//
//   single   dist.send, isend, recv and irecv run one after the other, each until its peer has come to its counterpart.
//   group    The operations of one batch_isend_irecv run together, and meet those of the peers' groups: NCCL may have
//            other communicators for single ones.
//
// Every rank writes what it issues into the store. Before a rank waits for a unit, single or group, it replays those of
// all ranks; ranks that wait for each other in a circle would wait without end.
#pragma once
#include <torch/csrc/distributed/c10d/Store.hpp>

#include <chrono>
#include <sstream>
#include <thread>

namespace softcuda {

struct Operation {
  bool is_send;
  int peer;
};

struct Unit {
  bool is_group;
  std::vector<Operation> open;  // operations that have not met their counterparts

  std::string as_text() const {
    std::ostringstream text;
    text << is_group;
    for (auto& [is_send, peer] : open) text << ' ' << is_send << ' ' << peer;
    return text.str();
  }
  static Unit from_text(const std::string& given) {
    std::istringstream text(given);
    Unit unit{};
    text >> unit.is_group;
    for (Operation operation; text >> operation.is_send >> operation.peer;) unit.open.push_back(operation);
    return unit;
  }
};

class PeerOrder {
 public:
  PeerOrder(int rank, int size, c10::intrusive_ptr<c10d::Store> store)
      : rank_(rank), store_(std::move(store)), ranks_(size) {}

  // Write a unit down and return its number, from 1.
  int issue(const Unit& unit) {
    store_->set(key_of(rank_, num_issued_), unit.as_text());
    return ++num_issued_;
  }

  // Wait until all ranks that a unit needs have come to it. Raises what NCCL would hang in.
  void wait_for(int number, std::chrono::milliseconds timeout) {
    const auto end = std::chrono::steady_clock::now() + timeout;
    while (true) {
      replay();
      if (ranks_[rank_].num_done >= number) return;
      std::vector<int> path;
      const auto circle = circle_from(rank_, path);
      TORCH_CHECK(circle.empty(), "NCCL would hang: ", circle, ". Single sends and receives run one after the other, ",
                  "each until its peer has come to its counterpart, and a group does not meet single ones: give all ",
                  "that ranks exchange at a time to one torch.distributed.batch_isend_irecv (soft NCCL)");
      TORCH_CHECK(std::chrono::steady_clock::now() < end, "Timed out: rank ", rank_, " ", head_of(rank_),
                  ", which has not come to it within ", timeout.count(), " ms (soft NCCL)");
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
  }

 private:
  struct Rank {
    std::optional<Unit> head;  // the one that runs, once it is known
    int num_done = 0;
  };

  static std::string key_of(int rank, int number) { return c10::str("softnccl_p2p_", rank, "_", number); }

  void replay() {
    for (bool moved = true; std::exchange(moved, false);)
      for (int rank = 0; rank < int(ranks_.size()); rank++) {
        if (!read_head(rank)) continue;
        auto& [head, num_done] = ranks_[rank];
        moved |= std::erase_if(head->open, [&](auto& operation) { return meets(operation, rank); }) > 0;
        if (!head->open.empty()) continue;
        head.reset();
        num_done++;
        moved = true;
      }
  }

  bool read_head(int rank) {
    auto& [head, num_done] = ranks_[rank];
    const auto key = key_of(rank, num_done);
    if (!head && store_->check({key})) head = Unit::from_text(store_->get_to_str(key));
    return head.has_value();
  }

  // Whether an operation of the rank's head meets its counterpart, which is taken away.
  bool meets(const Operation& operation, int rank) {
    if (operation.peer == rank || !read_head(operation.peer)) return false;
    auto& other = *ranks_[operation.peer].head;
    if (other.is_group != ranks_[rank].head->is_group) return false;
    auto found = std::find_if(other.open.begin(), other.open.end(), [&](auto& candidate) {
      return candidate.peer == rank && candidate.is_send != operation.is_send;
    });
    if (found == other.open.end()) return false;
    other.open.erase(found);
    return true;
  }

  // "rank 0 sends to rank 1, rank 1 sends to rank 0", or nothing: what can be reached from a rank, which waits for it.
  std::string circle_from(int rank, std::vector<int>& path) {
    const auto begin = std::find(path.begin(), path.end(), rank);
    if (begin != path.end()) {
      std::string circle;
      for (auto member = begin; member != path.end(); member++)
        circle += c10::str(member == begin ? "" : ", ", "rank ", *member, " ", head_of(*member));
      return circle;
    }
    if (!ranks_[rank].head) return "";
    path.push_back(rank);
    for (auto& operation : ranks_[rank].head->open)
      if (auto circle = circle_from(operation.peer, path); !circle.empty()) return circle;
    path.pop_back();
    return "";
  }

  std::string head_of(int rank) {
    const auto& head = *ranks_[rank].head;
    std::string text;
    for (auto& [is_send, peer] : head.open)
      text += c10::str(text.empty() ? "" : " and ", is_send ? "sends to" : "receives from", " rank ", peer);
    return text + (head.is_group ? " in a group" : "");
  }

  int rank_, num_issued_ = 0;
  c10::intrusive_ptr<c10d::Store> store_;
  std::vector<Rank> ranks_;
};

}  // namespace softcuda
