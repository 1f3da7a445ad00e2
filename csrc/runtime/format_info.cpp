// See format_info.h. Names of weights in groups: kind of code, columns of a group, kind of scale, and Z where there are
// zeros.
#include "runtime/format_info.h"

#include <deque>
#include <stdexcept>
#include <string>

#include "runtime/grouped.h"

namespace kt {
namespace {

struct Grouped {
  std::deque<std::string> names;  // which stay where they are
  std::vector<FormatInfo> infos;

  void add(const std::string& name, const GroupForm& form) {
    names.push_back(name);
    const ActForm act = form.codes == CodeKind::F8 ? ActForm::Float : ActForm::Q32;
    infos.push_back({form.type(), names.back().c_str(), form.size, form.block_bytes(), act});
  }

  Grouped() {
    const struct {
      ScaleKind kind;
      const char* name;
    } scales[] = {{ScaleKind::F16, "_F16"}, {ScaleKind::BF16, "_BF16"}, {ScaleKind::F32, "_F32"}};
    for (const int size : {32, 128}) {
      const std::string columns = std::to_string(size);
      for (const auto& scale : scales) {
        for (const bool has_zero : {false, true}) {
          const std::string end = columns + scale.name + (has_zero ? "_Z" : "");
          add("I4_" + end, {CodeKind::I4, scale.kind, has_zero, size});
          add("I8_" + end, {CodeKind::I8, scale.kind, has_zero, size});
        }
        add("F8_" + columns + scale.name, {CodeKind::F8, scale.kind, false, size});
      }
    }
    add("MXFP8", {CodeKind::F8, ScaleKind::E8M0, false, 32});
    add("NVFP4_F32", kNvfp4);
  }
};

const Grouped& grouped() {
  static const Grouped all;
  return all;
}

}  // namespace

const std::vector<FormatInfo>& grouped_formats() { return grouped().infos; }

const FormatInfo& format_info(QType type) {
  for (const FormatInfo& info : kFormats)
    if (info.type == type) return info;
  for (const FormatInfo& info : grouped_formats())
    if (info.type == type) return info;
  throw std::invalid_argument("no kernel for weights of type " + std::to_string(static_cast<int>(type)));
}

}  // namespace kt
